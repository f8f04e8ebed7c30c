"""How an operator's browser comes to the console without its user typing the operators' key.

`kvrelay console` asks for a ticket with the key, and prints the console's address with it after the
"#", which no browser sends. The page hands the ticket in, once, and gets a session: it may what the
key may, for half a day. The page keeps it as it keeps a key, for the tab. It is no cookie: cookies
know no ports, so a server of another user of the machine, at another port, would be sent it.
"""

from __future__ import annotations

import hmac
import secrets
import time

TICKET_S = 120.0
SESSION_S = 12 * 3600.0
MAX_TICKETS = 16  # that are open; the oldest goes
_NAME = "console"


class ConsoleSessions:
    """Owned by the API of one process. A session outlives it: it is signed with the key."""

    def __init__(self, operations_key: str) -> None:
        self._key = operations_key.encode()
        self._tickets: dict[str, float] = {}  # until when each may be handed in

    def ticket(self) -> str:
        now = time.monotonic()
        self._tickets = {each: until for each, until in self._tickets.items() if until > now}
        while len(self._tickets) >= MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        made = secrets.token_urlsafe(24)
        self._tickets[made] = now + TICKET_S
        return made

    def begin(self, ticket: str) -> str:
        """A session; "" for what is no ticket, or one no longer."""
        if self._tickets.pop(ticket, 0.0) <= time.monotonic():
            return ""
        until = f"{time.time() + SESSION_S:.0f}"
        return f"{_NAME}.{until}.{self._sign(until)}"

    def admits(self, session: str) -> bool:
        """Whether it is one that was begun here, and is not over."""
        name, _, rest = session.partition(".")
        until, _, signature = rest.partition(".")
        if not self._key or name != _NAME or not (until.isascii() and until.isdigit()):
            return False
        wanted = self._sign(until).encode()
        is_ours = hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), wanted)
        return is_ours and len(until) < 16 and float(until) > time.time()

    def _sign(self, until: str) -> str:
        return hmac.digest(self._key, f"{_NAME} {until}".encode(), "sha256").hex()
