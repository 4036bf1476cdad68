"""What launchers check before they launch."""


def require(condition: bool, rule: str) -> None:
    """Raise ValueError, stating the rule, unless the arguments obey it."""
    if not condition:
        raise ValueError(f"A kernel's arguments break the rule: {rule}.")
