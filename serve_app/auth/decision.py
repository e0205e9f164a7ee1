"""The one decision: may this caller do that? A pure function of the key, the operation and the model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from serve_app.auth.principal import CALLER, Principal
from serve_app.auth.scopes import OF_ALL_MODELS, OF_ONE_MODEL, REQUIRED_SCOPE, Operation
from serve_app.errors import PermissionDenied

HOW_TO_SEND = "send `Authorization: Bearer <key>` or `X-API-Key: <key>`"


class Verdict(Enum):
    """What becomes of a call."""

    ALLOW = "allow"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict with its reason.

    Attributes:
        verdict: What becomes of the call.
        reason: For the caller: one line, without secrets; empty when it is allowed.
    """

    verdict: Verdict
    reason: str = ""


ALLOWED = Decision(Verdict.ALLOW)


def decide(
    principal: Principal | None, operation: Operation, model_name: str = "", *, is_health_open: bool = True
) -> Decision:
    """Whether a caller may do something.

    Args:
        principal: The caller's key; `None` when no valid one came.
        operation: What is asked.
        model_name: The model it is asked of, where it is asked of one. It is not looked up: a model that a key may
            not use is refused in the same words whether it exists or not.
        is_health_open: Whether the server's health is told without a key.
    """
    if operation is Operation.HEALTH and is_health_open:
        return ALLOWED
    if principal is None:
        return Decision(Verdict.UNAUTHENTICATED, f"no valid API key: {HOW_TO_SEND}")
    scope = REQUIRED_SCOPE[operation]
    if not principal.has_scope(scope):
        return Decision(
            Verdict.FORBIDDEN, f"key {principal.key_id!r} may not {operation.value}: it lacks the scope {scope.value!r}"
        )
    if operation in OF_ONE_MODEL and not principal.can_use(model_name):
        return Decision(
            Verdict.FORBIDDEN, f"key {principal.key_id!r} may not use model {model_name!r}: it is not one of its models"
        )
    if operation in OF_ALL_MODELS and not principal.can_use_all():
        return Decision(
            Verdict.FORBIDDEN, f"key {principal.key_id!r} may not {operation.value}: it is not a key of all models"
        )
    return ALLOWED


def check_caller(operation: Operation, model_name: str = "") -> None:
    """Refuse what the caller of this task may not do beside what it was let in for.

    Raises:
        PermissionDenied: Its key is not good for this.
    """
    caller = CALLER.get()
    if caller is not None:
        decision = decide(caller, operation, model_name)
        if decision.verdict is not Verdict.ALLOW:
            raise PermissionDenied(decision.reason)
