"""Machines come together, watch each other, and end with one reason: played by threads on one store."""

import json
import socket
import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from fullshard.errors import ProcessGroupError
from fullshard.program.launch.failure import Failure, brief
from fullshard.program.launch.script import peers
from fullshard.program.launch.script.machines import MachinePlan, Nodes
from fullshard.program.launch.script.peers import MachineEnded, PeerMonitor, RunFailure, lost_connection, post_failure
from fullshard.program.launch.script.rendezvous import DynamicRendezvous, make_card, meet, meet_newest

HOST = socket.gethostname()
NAMES = ["machine 0 (a)", "machine 1 (b)"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(peers, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr("fullshard.program.launch.script.rendezvous._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("fullshard.program.launch.script.rendezvous._LINGER_SECONDS", 0.0)


def plan(number, nnodes=2, run_id="none"):
    return MachinePlan(Nodes(nnodes, nnodes), number, 1, "10.0.0.1", 29500, "static", run_id)


def start(store, *plans, cards=None):
    """Start machines that come together on a store; the threads, and the list of what each gets: names, or an error."""
    results = [None] * len(plans)

    def one(place):
        card = make_card(plans[place]) if cards is None else cards[place]
        try:
            results[place], _ = meet_newest(store, plans[place], card, time.monotonic() + 5.0)
        except (ProcessGroupError, MachineEnded) as error:
            results[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(plans))]
    for thread in threads:
        thread.start()
        time.sleep(0)
    return threads, results


def meet_all(*plans, store=None, cards=None):
    """What each of some machines gets."""
    threads, results = start(store or HashStore(), *plans, cards=cards)
    for thread in threads:
        thread.join()
    return results


def test_machines_learn_each_others_names():
    first, second = meet_all(plan(0), plan(1))
    assert first == second
    assert [name.split(" (")[0] for name in first] == ["machine 0", "machine 1"]


@pytest.mark.parametrize(
    ("plans", "text"),
    [
        ((plan(1), plan(1, run_id="other")), "Each machine needs a number of its own, and two have --node_rank 1"),
        ((plan(0), plan(1, run_id="other")), "All machines need the same --rdzv_id"),
        ((plan(0, nnodes=3), plan(1)), "All machines need the same --nnodes"),
    ],
)
def test_machines_that_do_not_fit_together_are_all_told(plans, text):
    results = meet_all(*plans)
    assert all(text in str(result) for result in results)
    assert any(isinstance(result, ProcessGroupError) for result in results)


def test_who_is_missing_is_named():
    with pytest.raises(
        ProcessGroupError, match=r"1 of 3 machines arrived at 10\.0\.0\.1:29500 within 0 s; missing: .* 0, 2"
    ):
        meet(HashStore(), plan(1, nnodes=3), make_card(plan(1)), 0.05)


def test_who_failed_for_good_where_they_met_before_is_not_waited_for():
    former = HashStore()
    said = RunFailure(failure(), NAMES[0])
    post_failure(former, said)
    with pytest.raises(MachineEnded) as ended:
        meet(HashStore(), plan(1), make_card(plan(1)), 5.0, former)
    assert ended.value.failed == said


def joined(store, number):
    return PrefixStore(f"fullshard/{number}", store)


def test_a_machine_that_is_started_again_meets_the_others_in_a_round_of_its_own(capsys):
    store, cards = HashStore(), [make_card(plan(number)) for number in (0, 1)]
    first = meet_all(plan(0), plan(1), store=store, cards=cards)
    threads, results = start(store, plan(1))  # another card: what it was is lost
    until(lambda: joined(store, 1).check(["next"]))  # for the machine that goes on
    waits = "a launcher with --node_rank 1 was here before; waiting 0.08 s to see if it still runs"
    assert capsys.readouterr().err == f"fullshard: {waits}\n"
    assert meet_all(plan(0), store=store, cards=cards[:1]) == [first[0]]
    threads[0].join()
    assert results == [first[0]]
    assert store.get("fullshard/round") == b"2"


def test_one_that_is_lost_while_they_meet_is_replaced():
    store, plans = HashStore(), [plan(number, nnodes=3) for number in range(3)]
    joined(store, 1).set("card/1", json.dumps(make_card(plans[1])))
    store.set("fullshard/round", "1")
    threads, results = start(store, *plans[:2])
    until(lambda: store.get("fullshard/round") == b"2")
    results += meet_all(plans[2], store=store)
    for thread in threads:
        thread.join()
    assert results == [[f"machine {number} ({HOST})" for number in range(3)]] * 3


def test_a_machine_that_comes_too_many_does_not_end_a_run_that_goes_on():
    store, cards = HashStore(), [make_card(plan(number)) for number in (0, 1)]
    meet_all(plan(0), plan(1), store=store, cards=cards)
    both = [PeerMonitor(joined(store, 1), number, NAMES, hosts=number == 0) for number in (0, 1)]
    (late,) = meet_all(plan(1), store=store)
    assert "two have --node_rank 1" in str(late)
    assert not joined(store, 1).check(["next"])
    assert [one.failure() for one in both] == [None, None]
    for one in both:
        one.stop()


def failure(rank=3, message="no", kind="ValueError"):
    return Failure(rank, kind, message, "trace", 5, 1.0)


def until(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        pass
    assert condition()


@pytest.fixture
def pair():
    store = HashStore()
    both = [PeerMonitor(store, number, NAMES, hosts=number == 0) for number in (0, 1)]
    yield both
    for one in reversed(both):  # machine 0 waits for the others
        one.leave()


def test_the_first_reason_is_everybodys(pair):
    first = pair[1].post(RunFailure(failure(), NAMES[1]))
    assert pair[0].post(RunFailure(failure(rank=0), NAMES[0])) == first
    until(lambda: pair[0].failure() is not None)
    assert pair[0].failure() == pair[1].failure() == RunFailure(failure(), NAMES[1])


def test_a_run_is_over_when_all_machines_are_done(pair):
    pair[1].done()
    time.sleep(0)
    assert not pair[0].over
    pair[0].done()
    until(lambda: pair[0].over and pair[1].over)
    assert pair[0].failure() is None


def test_a_machine_that_shows_nothing_is_gone_and_the_others_are_told():
    store = HashStore()
    names = [*NAMES, "machine 2 (c)"]
    first, second, third = (PeerMonitor(store, number, names, hosts=number == 0) for number in range(3))
    until(lambda: len(first._heartbeats.texts) == 2)
    second._ended.set()  # killed
    until(lambda: first.failure(0.3) is not None)
    assert first.failure().failure.exit_code == 7
    assert "machine 1 (b) has sent no heartbeat for" in first.failure().failure.message
    until(lambda: third.failure() is not None)
    assert third.failure() == first.failure()
    for one in (third, first):
        one.leave()


def test_a_reason_said_here_is_not_forgotten_for_an_older_answer(monkeypatch):
    said = RunFailure(failure(), NAMES[0])
    made, answered, looked = threading.Event(), threading.Event(), threading.Event()

    def late(store):  # the store answers before, and is heard after, this machine says why it ends
        made.wait()
        if answered.is_set():
            looked.set()
        else:
            one.post(said)
            answered.set()
        return

    monkeypatch.setattr(peers, "read_failure", late)
    one = PeerMonitor(HashStore(), 0, NAMES[:1], hosts=True)
    made.set()
    until(looked.is_set)
    assert one.failure() == said
    one.leave()


def test_a_meeting_place_that_does_not_answer_is_gone():
    class Silent(HashStore):
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer")

    one = PeerMonitor(Silent(), 1, NAMES, hosts=False)
    until(lambda: one.failure(0.1) is not None)
    assert "machine 0 (a) has sent no heartbeat" in one.failure(0.1).failure.message


def test_a_lost_connection_is_told_from_a_cause():
    assert lost_connection(failure(message="[/gloo/pair.cc] Connection closed by peer", kind="RuntimeError"))
    assert lost_connection(failure(kind="DistBackendError"))
    assert not lost_connection(failure(message="index out of range", kind="IndexError"))
    assert brief(failure(message="one\ntwo")) == "rank 3: ValueError: one"
    assert brief(failure(message="rank 3 ended with exit code 5.")) == "rank 3 ended with exit code 5."


class Arrivals:
    """Torch's rendezvous, as far as it is asked: a machine waits from the start."""

    def __init__(self, rank):
        store = HashStore()
        store.set("MASTER_ADDR", "10.0.0.1")  # rank 0 is on another machine now than before
        store.set("MASTER_PORT", "7")
        self.info = RendezvousInfo(store, rank, 2, RendezvousStoreInfo("10.0.0.9", 9))

    def next_rendezvous(self):
        return self.info

    def num_nodes_waiting(self):
        return 1

    use_agent_store = True


def arrivals(rank, saved):
    """How many machines each look takes in, while the newest checkpoint is of these steps."""
    steps = iter(saved)
    handler = DynamicRendezvous(Arrivals(rank), lambda: next(steps))
    handler.next_round()
    return [handler.waiting() for _ in saved]


def test_a_machine_that_arrives_waits_for_the_next_checkpoint(capsys):
    assert arrivals(0, [20, 20, 20, 40]) == [0, 0, 0, 1]
    assert capsys.readouterr().err.count("it is taken in after the next checkpoint (the newest: step 20)") == 1
    assert arrivals(0, [None]) == [1], "a script that notes nothing is restarted at once"
    assert arrivals(1, [20, 40]) == [0, 0], "machine 0 decides"


@pytest.mark.parametrize(("rank", "place"), [(0, ("10.0.0.9", 9)), (1, ("10.0.0.1", 7))])
def test_the_address_of_rank_0_is_that_of_the_round(rank, place):
    inner = Arrivals(rank)
    found = DynamicRendezvous(inner, lambda: None).next_round()
    assert (found.address, found.port) == place
    assert inner.info.store.get("MASTER_ADDR") == place[0].encode()


def test_machines_of_a_round_learn_that_the_next_one_has_begun():
    handler = DynamicRendezvous(Arrivals(1), lambda: None)
    handler.next_round()
    assert not handler._round.store.check(["next"])
    handler.next_round()
    assert handler._round.store.check(["next"])


def test_a_machine_0_that_is_silent_is_lost_also_where_the_store_is_another_machines():
    store = HashStore()
    other = PeerMonitor(store, 1, NAMES, hosts=True)
    until(lambda: store.check(["beat/1"]))
    assert other.failure(60.0) is None
    assert "machine 0 (a) has sent no heartbeat" in other.failure(0.0).failure.message
    other.stop()
