"""How the simulator refuses: what came and what is accepted."""


class NkiValidationError(Exception):
    """Raised when a documented constraint is violated (page nki.isa.NkiValidationError)."""


def check(condition, message, error=NkiValidationError):
    if not condition:
        raise error(message)
