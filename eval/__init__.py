"""Measure: workloads, traces, and what they say of acceptance, entropy and speed."""
