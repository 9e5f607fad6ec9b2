"""What requests cost, over all attempts of a run."""

from pathlib import Path

from sparksmith.distill.ledger import LEDGER_FILE, Budget, Ledger, Prices


def test_what_was_in_flight_at_a_kill_counts_with_all_it_may_have_cost(tmp_path: Path) -> None:
    first = Ledger(tmp_path, Budget())
    assert first.reserve("a", 10, 100)
    first.done("a", 12, 30)
    assert first.reserve("b", 10, 100)
    assert first.spent().tokens == 42
    # The process dies here, in the middle of another line.
    with (tmp_path / LEDGER_FILE).open("a") as file:
        file.write('{"sent": "c", "pro')
    second = Ledger(tmp_path, Budget())
    spent = second.spent()
    assert (spent.prompt, spent.answer) == (12, 30)
    assert (spent.lost_requests, spent.lost_prompt, spent.lost_answer) == (1, 10, 100)
    assert second.reserve("b", 10, 100)
    second.done("b", 11, 40)
    # Sent twice, and paid for twice.
    third = Ledger(tmp_path, Budget()).spent()
    assert (third.prompt, third.answer, third.lost_answer) == (23, 70, 100)


def test_a_budget_counts_what_is_in_flight(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Budget(tokens=250))
    assert ledger.reserve("a", 20, 100)
    assert ledger.reserve("b", 20, 100)
    assert not ledger.reserve("c", 20, 100)
    ledger.done("a", 20, 10)
    assert not ledger.reserve("c", 20, 100)
    ledger.done("b", 20, 10)
    assert ledger.reserve("c", 20, 100)


def test_a_budget_in_dollars(tmp_path: Path) -> None:
    prices = Prices(prompt=1.0, answer=4.0)
    ledger = Ledger(tmp_path, Budget(dollars=0.001, prices=prices))
    # 200 x 1 + 200 x 4 = 1,000 millionths of a dollar.
    assert ledger.reserve("a", 200, 200)
    assert not ledger.reserve("b", 1, 0)
    ledger.done("a", 200, 100)
    assert ledger.spent().dollars(prices) == 0.0006
    assert ledger.reserve("b", 0, 100)
    ledger.fail("b", "HTTP 500")
    assert ledger.failed == {"b": "HTTP 500"}
    assert ledger.spent().dollars(prices) == 0.0006
