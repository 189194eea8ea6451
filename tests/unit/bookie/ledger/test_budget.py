"""The byte budget, compared with a simple model that keeps the reported bytes of every ledger."""

from random import Random

from magnetar.bookie.ledger.budget import Account, ByteBudget


def budget() -> ByteBudget:
    return ByteBudget(retained_bytes_max=1000, lag_bytes_max=100)


def test_the_budget_equals_the_sum_of_all_reports() -> None:
    random, tested = Random(1), budget()
    streams = [object() for _ in range(4)]
    accounts = [Account() for _ in range(5)]
    twin = [(0, 0, ())] * 5
    for _ in range(2000):
        ledger = random.randrange(5)
        lag = random.choice([0, random.randrange(200)])
        laggards = tuple(random.sample(streams, random.randrange(3)))
        retained = lag + random.randrange(300)
        twin[ledger] = (retained, lag, laggards)
        tested.account(accounts[ledger], retained=retained, lag=lag, laggards=laggards)  # type: ignore[arg-type]
        tested.check()
        assert tested.retained == sum(each[0] for each in twin)
        assert tested.exhausted == (tested.retained >= 1000)
        for stream in streams:
            total = sum(each[1] for each in twin if stream in each[2])
            assert tested.lags(stream) == (total > 100)  # type: ignore[arg-type]


def test_waiters_are_woken_once_when_the_budget_has_room() -> None:
    tested, account, woken = budget(), Account(), list[str]()
    tested.account(account, retained=1500, lag=0, laggards=())
    tested.when_room("a", lambda: woken.append("a"))
    tested.when_room("b", lambda: woken.append("b"))
    tested.account(account, retained=1200, lag=0, laggards=())
    assert woken == []
    tested.account(account, retained=999, lag=0, laggards=())
    assert woken == ["a", "b"]
    tested.account(account, retained=1500, lag=0, laggards=())
    tested.account(account, retained=0, lag=0, laggards=())
    assert woken == ["a", "b"]
