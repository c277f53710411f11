"""Publishing to a hub that refuses, fails, breaks off, loses answers or is slow: nothing is lost or sent twice."""

from pathlib import Path

import hub
import pytest
from published import LARGE, PUBLISHED

from headpool import hub as client
from headpool.errors import HeadpoolError, RequestError
from headpool.publish import publish


def test_forbidden_in_the_middle(made: Path, served: hub.Hub) -> None:
    served.fail("/commit/", status=403)
    with pytest.raises(RequestError, match="no right to write to me/gqa"):
        publish(made, "me/gqa")
    received = list(served.received)
    publish(made, "me/gqa")
    assert served.received == received, "the weights were up already"
    assert set(served.files("me/gqa")) == {".gitattributes", *PUBLISHED}


EVERY_STEP = (
    "/api/validate-yaml", "/api/models/me/gqa$", "/api/repos/create", "/preupload/", "/lfs/objects/batch", "/objects/",
    "/commit/",
)  # fmt: skip


@pytest.mark.parametrize("step", EVERY_STEP)
def test_a_hub_that_fails_twice_is_asked_again(made: Path, served: hub.Hub, step: str) -> None:
    served.fail(step, status=500, times=2)
    publish(made, "me/gqa")
    assert served.failures[0].times == 0, "it was asked"
    assert set(served.files("me/gqa")) == {".gitattributes", *PUBLISHED}
    assert len(served.received) == LARGE
    assert len(served.repositories["me/gqa"].branches["main"]) == 2


def test_a_hub_that_goes_on_failing_is_given_up(made: Path, served: hub.Hub) -> None:
    served.fail("/commit/", status=503, times=10**6)
    with pytest.raises(HeadpoolError, match=r"the hub failed \(503.*run the same command again") as caught:
        publish(made, "me/gqa")
    assert caught.value.exit_code == 1
    assert sum("/commit/" in one for one in served.asked) == client.ATTEMPTS


def test_a_connection_that_breaks_in_the_middle_of_a_file(made: Path, served: hub.Hub) -> None:
    served.fail("/objects/", after_bytes=70_000)
    publish(made, "me/gqa")
    assert set(served.files("me/gqa")) == {".gitattributes", *PUBLISHED}
    assert len(served.received) == len(set(served.received)) == LARGE


def test_interrupted_in_the_middle_the_same_command_goes_on(made: Path, served: hub.Hub) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if len(served.received) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(made, "me/gqa", progress=stop)
    assert set(served.files("me/gqa")) == {".gitattributes"}, "nothing is committed before all of it is there"
    first = list(served.received)
    shown: list[tuple[int, int]] = []
    publish(made, "me/gqa", progress=lambda what, done, total: shown.append((done, total)))
    assert len(served.received) == len(set(served.received)) == LARGE
    assert served.received[:2] == first
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert (
        shown[-1][0]
        == shown[-1][1]
        == sum(len(one) for name, one in served.files("me/gqa").items() if name in PUBLISHED)
    )


def test_a_commit_whose_answer_is_lost_is_not_made_twice(made: Path, served: hub.Hub) -> None:
    served.fail("/commit/", lost=True)
    result = publish(made, "me/gqa")
    commits = served.repositories["me/gqa"].branches["main"]
    assert [one.title for one in commits].count(commits[0].title) == 1
    assert result.commit == commits[0].sha


def test_a_slow_hub_is_waited_for(made: Path, served: hub.Hub) -> None:
    served.fail("/commit/", seconds=1.0)
    served.fail("/objects/", seconds=0.3, times=2)
    publish(made, "me/gqa")
    assert set(served.files("me/gqa")) == {".gitattributes", *PUBLISHED}
