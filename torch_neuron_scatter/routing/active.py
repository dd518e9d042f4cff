"""The device types that are routed now, in a place of its own: what decides a call reads it, and a compiled graph guards on it."""


class _Active:
    def __init__(self):
        self.devices = frozenset()


ACTIVE = _Active()
