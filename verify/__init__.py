"""Verify disposes: the target, the accept rules, and the decode loop that joins them."""
