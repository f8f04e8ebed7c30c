"""Keys and usage of one server: a SQLite file in the state directory, which its routers share."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvrelay.cluster.api.database import Database
from kvrelay.cluster.api.keys.record import ApiKey, Batch, Counts, Known, Taken, Use

FILE = "keys.db"
VERSION = 1
KEEP_DAYS = 400  # usage is kept for
_TABLES = (
    "CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, record TEXT, seen_at REAL)",
    "CREATE TABLE IF NOT EXISTS changes (id INTEGER PRIMARY KEY CHECK (id = 0), number INTEGER)",
    "INSERT OR IGNORE INTO changes VALUES (0, 0)",
    "CREATE TABLE IF NOT EXISTS used (day INTEGER, tenant TEXT, key TEXT, model TEXT,"
    " requests INTEGER, input INTEGER, cached INTEGER, output INTEGER,"
    " PRIMARY KEY (day, tenant, key, model)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS taken (day INTEGER, key TEXT, requests INTEGER, tokens INTEGER,"
    " PRIMARY KEY (day, key)) WITHOUT ROWID",
)
_USE = """
INSERT INTO used VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, input = input + excluded.input,
    cached = cached + excluded.cached, output = output + excluded.output
"""
_TAKE = """
INSERT INTO taken VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, tokens = tokens + excluded.tokens
"""


class KeyStore:
    """Owned by the API. May be called from any thread; several processes may share the file. Calls
    raise sqlite3.Error and OSError."""

    def __init__(self, path: Path | None = None) -> None:
        """Opens the file at `path`; None: keeps all in memory. Raises sqlite3.Error, OSError."""
        self._database = Database(path, VERSION, *_TABLES)
        self._change, self._read = self._database.writing, self._database.read

    def exchange(self, batch: Batch, seen: str) -> Known:
        """Adds what a router has counted, and returns what it does not know. seen: the version of
        the keys that it knows. All of it happens, or nothing."""
        if batch.used or batch.taken or batch.seen_at:
            with self._change() as connection:
                connection.executemany(_USE, ((*use, *had) for use, had in batch.used.items()))
                rows = ((batch.day, key, *had) for key, had in batch.taken.items())
                connection.executemany(_TAKE, rows)
                query = "UPDATE keys SET seen_at = MAX(COALESCE(seen_at, 0), ?) WHERE id = ?"
                connection.executemany(query, ((at, key) for key, at in batch.seen_at.items()))
        ((number,),) = self._read("SELECT number FROM changes")
        version = str(number)
        records = self._read("SELECT record FROM keys") if version != seen else ()
        keys = tuple(msgspec.json.decode(text, type=ApiKey) for (text,) in records)
        marks = ", ".join("?" * len(batch.asked))
        query = f"SELECT key, requests, tokens FROM taken WHERE day = ? AND key IN ({marks})"
        found = self._read(query, batch.day, *batch.asked)
        taken = dict.fromkeys(batch.asked, Taken())
        taken |= {key: Taken(requests, tokens) for key, requests, tokens in found}
        return Known(version, keys if version != seen else None, taken)

    def put(self, key: ApiKey) -> None:
        """Adds a key, or changes it."""
        query = "INSERT INTO keys (id, record) VALUES (?, ?) ON CONFLICT DO UPDATE SET record = ?"
        text = msgspec.json.encode(key).decode()
        with self._change() as connection:
            connection.execute(query, (key.id, text, text))
            connection.execute("UPDATE changes SET number = number + 1")

    def delete(self, ids: list[str], today: int) -> None:
        """Forgets keys, and usage that is older than KEEP_DAYS."""
        with self._change() as connection:
            connection.executemany("DELETE FROM keys WHERE id = ?", [(each,) for each in ids])
            connection.execute("DELETE FROM used WHERE day < ?", (today - KEEP_DAYS,))
            connection.execute("DELETE FROM taken WHERE day < ?", (today - 1,))
            connection.execute("UPDATE changes SET number = number + 1")

    def seen_at(self) -> dict[str, float]:
        """When each key was last used, of those that were."""
        return dict(self._read("SELECT id, seen_at FROM keys WHERE seen_at IS NOT NULL"))

    def used(self, first: int, last: int) -> dict[Use, Counts]:
        """Returns usage of the days from `first` to `last`, both included."""
        rows = self._read("SELECT * FROM used WHERE day BETWEEN ? AND ?", first, last)
        return {Use(*row[:4]): Counts(*row[4:]) for row in rows}

    def close(self) -> None:
        self._database.close()
