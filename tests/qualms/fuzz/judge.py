"""Compares the replies to a case with the requests that h11 reads from it."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.qualms.fuzz.case import Case, sentinel, sentinel_id
from tests.qualms.fuzz.exchange import Outcome
from tests.qualms.fuzz.oracle import Message
from tests.qualms.fuzz.replies import Reply, problem_with_error
from tests.qualms.fuzz.rules import REFUSALS, STRICTER, Rule, path_of, route_of, route_statuses
from tests.qualms.fuzz.service import Counts

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass
class Verdict:
    """Everything that one case shows."""

    violations: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """documented differences from h11"""
    answered: Counts = field(default_factory=Counter)
    """replies that the client received"""
    unread: int = 0
    """requests that the service may have answered without that the client received the reply"""


@dataclass(frozen=True)
class Judge:
    """The checks; `check_prediction` returns the error of a prediction, or None."""

    max_body_bytes: int
    check_prediction: Callable[[bytes], str | None] = lambda _: None

    def __call__(self, case: Case, outcome: Outcome) -> Verdict:
        """Check one case."""
        verdict = Verdict()
        messages, replies = outcome.stream.messages, outcome.replies
        wanted, follows = sentinel_id(case.number), sentinel(case.number)
        for index, reply in enumerate(replies):
            if index < len(messages):
                if reply.status != 200 or reply.closes or reply.request_id != wanted or messages[index].head != follows:
                    self._judge_reply(messages[index], reply, verdict)
                else:
                    verdict.answered["health", 200] += 1
            else:
                _judge_refusal(outcome, index, reply, verdict)
            if reply.closes and index + 1 < len(replies):
                verdict.violations.append("a reply after one that closes the connection")
        _judge_sync(case, outcome, verdict)
        _judge_end(outcome, verdict)
        if outcome.abandoned or outcome.half_closed or outcome.closed:
            verdict.unread = max(0, len(messages) + (outcome.stream.end == "refused") - len(replies))
        return verdict

    def _judge_reply(self, message: Message, reply: Reply, verdict: Verdict) -> None:
        """Check the reply to a request whose head h11 accepts."""
        path = path_of(message.target)
        expected = route_statuses(message, self.max_body_bytes)
        rules = [rule for rule in STRICTER if rule.applies(message)]
        head = replace(message, framing=b"") if rules else message
        head_rules = [rule for rule in rules if rule.applies(head)]
        refused_by_head = _refused_by(head_rules, message, reply, reply.status in expected)
        refused = refused_by_head or _refused_by_body(rules, message, reply)
        route = "protocol" if refused_by_head else route_of(path)  # errors in the body are counted by the route
        verdict.answered[route, reply.status] += 1
        _judge_form(reply, verdict, has_body=message.method != b"HEAD" or bool(reply.body))
        if any(before != 100 or not message.values(b"expect") for before in reply.before):
            verdict.violations.append(f"an informational reply {reply.before} that was not asked for")
        if refused:
            verdict.differences.append(f"refused: {refused}")
            if not reply.closes:
                verdict.violations.append(f"refused without closing the connection: {refused}")
            return
        # A request may be answered before its body is read if the connection is then closed; predictions need the body.
        reads_body = not reply.closes or (path == "/predict" and reply.status == 200)
        required = [rule.name for rule in (rules if reads_body else head_rules) if rule.required]
        if required:
            verdict.violations.append(f"accepted with {reply.status}: {required[0]}")
        elif reply.status not in expected:
            verdict.violations.append(f"{reply.status} on route {route}, expected {sorted(expected)}")
        ids = message.values(b"x-request-id")
        if not (reply.status >= 400 and reply.closes) and _is_usable(ids) and reply.request_id != ids[0]:
            verdict.violations.append("the reply has the id of another request")
        _judge_close(message, reply, verdict)
        if path == "/predict" and reply.status == 200:
            if not message.complete:
                verdict.violations.append("a prediction for an incomplete or broken body")
            if error := self.check_prediction(reply.body):
                verdict.violations.append(error)


def _judge_close(message: Message, reply: Reply, verdict: Verdict) -> None:
    """Check whether the connection is rightly closed or kept after the reply of a route."""
    if not message.complete and not reply.closes:
        verdict.violations.append(f"{reply.status} without a close after an incomplete or broken body")
    if reply.closes and reply.status < 400 and message.complete and message.persistent and not message.may_close:
        if message.has_body:
            verdict.differences.append("closed because the body was not read")
        else:
            verdict.violations.append(f"closed after a {reply.status} without need")


def _is_usable(ids: list[bytes]) -> bool:
    """Whether the service returns the request id of a request with these ids."""
    return len(ids) == 1 and _REQUEST_ID.fullmatch(ids[0]) is not None


def _refused_by(rules: list[Rule], message: Message, reply: Reply, is_expected: bool) -> str:
    """The name of the rule by which the head was refused; empty if the reply is the route's."""
    closes_unasked = reply.closes and message.persistent and not message.may_close
    for rule in rules:
        if reply.status in rule.statuses and (rule.required or not is_expected or closes_unasked):
            return rule.name
    return ""


def _refused_by_body(rules: list[Rule], message: Message, reply: Reply) -> str:
    """The reason for which the body was refused; empty if the reply is the route's."""
    if not reply.closes:
        return ""
    if reply.status == 400 and not message.complete:
        return "error in the body"
    return next((rule.name for rule in rules if reply.status in rule.statuses), "")


def _judge_form(reply: Reply, verdict: Verdict, *, has_body: bool) -> None:
    if reply.status >= 500 and reply.status not in (501, 504, 505):
        verdict.violations.append(f"status {reply.status}")
    if reply.status >= 400 and (error := problem_with_error(reply, has_body=has_body)):
        verdict.violations.append(error)


def _judge_refusal(outcome: Outcome, index: int, reply: Reply, verdict: Verdict) -> None:
    """Check a reply to bytes that h11 does not read as a request."""
    verdict.answered["protocol", reply.status] += 1
    stream = outcome.stream
    has_body = not stream.rest.lstrip().startswith(b"HEAD ") or bool(reply.body)
    _judge_form(reply, verdict, has_body=has_body)
    if index > len(stream.messages) or stream.end not in ("refused", "incomplete"):
        verdict.violations.append(f"more replies than requests: {reply.status}")
    elif stream.messages and not stream.messages[-1].complete:
        verdict.violations.append(f"two replies to one request: {outcome.replies[index - 1].status}, {reply.status}")
    elif reply.status not in REFUSALS:
        reason = stream.error.partition(":")[0] or "incomplete"
        verdict.violations.append(f"accepted with {reply.status}; h11: {reason}")
    elif not reply.closes:
        verdict.violations.append(f"a refusal, {reply.status}, without Connection: close")


def _judge_sync(case: Case, outcome: Outcome, verdict: Verdict) -> None:
    """Check that the sentinel was answered only if h11 reads it as a request, and in its place."""
    if outcome.surplus and not outcome.overdue:
        verdict.violations.append("bytes after the last reply")
    wanted = sentinel_id(case.number)
    for index, reply in enumerate(outcome.replies):
        if reply.request_id == wanted and reply.status == 200:
            messages = outcome.stream.messages
            if index >= len(messages) or wanted not in messages[index].values(b"x-request-id"):
                verdict.violations.append("the sentinel is answered out of place")


def _judge_end(outcome: Outcome, verdict: Verdict) -> None:
    """Check that every request was answered and that connections close when they must."""
    if outcome.malformed:
        verdict.violations.append(f"malformed reply: {outcome.malformed.partition(':')[0]}")
        return
    replies, stream = outcome.replies, outcome.stream
    if outcome.overdue:
        verdict.violations.append(f"no reply and no close (h11: {stream.end})")
        return
    if outcome.abandoned or outcome.half_closed:
        return
    closing = bool(replies) and replies[-1].closes
    answered = min(len(replies), len(stream.messages))
    if answered < stream.complete and not closing:
        allowed = answered > 0 and stream.messages[answered - 1].may_close
        if not allowed:
            how = "reset" if outcome.reset else "close"
            verdict.violations.append(f"{how} instead of a reply to a complete request")
    elif stream.end == "refused" and not replies[stream.complete :] and not closing:
        verdict.differences.append("closed without a reply to what h11 refuses")
    elif stream.end == "incomplete" and not replies[stream.complete :] and not closing:
        verdict.differences.append("closed without a reply to an incomplete request")
    if outcome.reset and closing:
        verdict.differences.append("reset after the last reply")
