"""Items of conversations: a row each, so a call touches those that it is about.

An item is kept as JSON without its id, which is a column; together they are bytes of a list again,
so that nothing is parsed to be shown. Sums stand beside them, so that limits cost no reading.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvrelay.cluster.api.responses.store import ResponseStore

MAX_ID_CHARS = 256
_HEAD = """
SELECT r.record, COALESCE(c.num_items, 0), COALESCE(c.num_bytes, 0)
    FROM responses r LEFT JOIN conversations c ON c.tenant = r.tenant AND c.id = r.id
    WHERE r.tenant = ? AND r.id = ?
"""
_SUMS = "SELECT num_items, num_bytes, next_position FROM conversations WHERE tenant = ? AND id = ?"
_SET_SUMS = """
INSERT OR REPLACE INTO conversations (num_items, num_bytes, next_position, tenant, id)
    VALUES (?, ?, ?, ?, ?)
"""
_OF = "FROM conversation_items WHERE tenant = ? AND conversation = ?"
_ADD = """
INSERT INTO conversation_items (tenant, conversation, position, id, num_bytes, item)
    VALUES (?, ?, ?, ?, ?, ?)
"""

Row = tuple[str, bytes]
"""Its id ("": it is to be given one), and its JSON without that."""


class Head(NamedTuple):
    record: bytes
    num_items: int
    num_bytes: int


class Most(NamedTuple):
    num_items: int
    num_bytes: int


class TooLarge(Exception):
    """A conversation would have so many items, of so many bytes."""

    def __init__(self, num_items: int, num_bytes: int) -> None:
        super().__init__(num_items, num_bytes)
        self.num_items, self.num_bytes = num_items, num_bytes


class ConversationItems:
    """Rows of the store. All calls block; KeyError: the conversation, or the item, is not there."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def head(self, tenant: str, name: str) -> Head:
        with self._store.reading() as connection:
            row = connection.execute(_HEAD, (tenant, name)).fetchone()
        if row is None:
            raise KeyError(name)
        return Head(*row)

    def begin(self, tenant: str, name: str, record: bytes, rows: Sequence[Row], most: Most) -> None:
        """A new conversation. Raises TooLarge."""
        with self._store.writing() as connection:
            self._store.put_by(connection, tenant, name, record)
            self._add(connection, (tenant, name), rows, most)
            self._store.count(connection, sum(map(num_bytes_of, rows)))
            self._store.check_kept(connection, tenant, name)

    def move(
        self, tenant: str, name: str, old: bytes, record: bytes, rows: Sequence[Row], num_ever: int
    ) -> None:
        """Make rows of a record, `old`, that had its items in it, unless it has changed meanwhile.
        Its age stays."""
        with self._store.writing() as connection:
            found = connection.execute(_HEAD, (tenant, name)).fetchone()
            if found is None or found[0] != old:
                return
            query = "UPDATE responses SET record = ? WHERE tenant = ? AND id = ?"
            connection.execute(query, (record, tenant, name))
            self._add(connection, (tenant, name), rows, None)
            query = "UPDATE conversations SET next_position = ? WHERE tenant = ? AND id = ?"
            connection.execute(query, (max(num_ever, len(rows)), tenant, name))

    def append(self, tenant: str, name: str, rows: Sequence[Row], most: Most) -> list[str]:
        """Returns their ids: given ones stay, unless another item has it. Raises TooLarge."""
        with self._store.writing() as connection:
            self._touch(connection, tenant, name)
            ids = self._add(connection, (tenant, name), rows, most)
            self._store.count(connection, sum(map(num_bytes_of, rows)))
            self._store.check_kept(connection, tenant, name)
        return ids

    def _touch(self, connection: sqlite3.Connection, tenant: str, name: str) -> None:
        """It has changed: it is the youngest."""
        row = connection.execute(_HEAD, (tenant, name)).fetchone()
        if row is None:
            raise KeyError(name)
        self._store.put_by(connection, tenant, name, row[0])

    def _add(
        self,
        connection: sqlite3.Connection,
        key: tuple[str, str],
        rows: Sequence[Row],
        most: Most | None,
    ) -> list[str]:
        sums = connection.execute(_SUMS, key).fetchone() or (0, 0, 0)
        num_items, num_bytes, position = sums[0] + len(rows), sums[1], sums[2]
        num_bytes += sum(map(num_bytes_of, rows))
        if most is not None and (num_items > most.num_items or num_bytes > most.num_bytes):
            raise TooLarge(num_items, num_bytes)
        ids, own = list[str](), f"item_{key[1].partition('_')[2]}_"
        for given, body in rows:
            name = given or f"{own}{position}"
            while connection.execute(f"SELECT 1 {_OF} AND id = ?", (*key, name)).fetchone():
                name, position = f"{own}{position}", position + 1
            size = num_bytes_of((given, body))
            connection.execute(_ADD, (*key, position, name, size, body))
            ids.append(name)
            position += 1
        connection.execute(_SET_SUMS, (num_items, num_bytes, position, *key))
        return ids

    def all(self, tenant: str, name: str) -> list[Row]:
        with self._store.reading() as connection:
            query = f"SELECT id, item {_OF} ORDER BY position"
            return connection.execute(query, (tenant, name)).fetchall()

    def page(
        self, tenant: str, name: str, after: str | None, is_asc: bool, limit: int, max_bytes: int
    ) -> tuple[list[Row], bool]:
        """Those behind the item `after`: `limit` at most, of `max_bytes` together or one, and
        whether there are more. No other item is read."""
        way, sign, start = ("ASC", ">", -1) if is_asc else ("DESC", "<", 1 << 62)
        key = tenant, name
        with self._store.reading() as connection:
            if after is not None:
                query = f"SELECT position {_OF} AND id = ?"
                found = connection.execute(query, (*key, after)).fetchone()
                if found is None:
                    raise KeyError(after)
                (start,) = found
            part = f"{_OF} AND position {sign} ? ORDER BY position {way} LIMIT ?"
            query = f"SELECT num_bytes {part}"
            sizes = connection.execute(query, (*key, start, limit + 1)).fetchall()
            num_fit = total = 0
            for (size,) in sizes[:limit]:
                total += size
                if num_fit and total > max_bytes:
                    break
                num_fit += 1
            query = f"SELECT id, item {part}"
            rows = connection.execute(query, (*key, start, num_fit)).fetchall()
        return rows, num_fit < len(sizes)

    def one(self, tenant: str, name: str, item: str) -> Row:
        with self._store.reading() as connection:
            query = f"SELECT id, item {_OF} AND id = ?"
            row: Row | None = connection.execute(query, (tenant, name, item)).fetchone()
        if row is None:
            raise KeyError(item)
        return row

    def remove(self, tenant: str, name: str, item: str) -> None:
        key = tenant, name
        with self._store.writing() as connection:
            query = f"SELECT position, num_bytes {_OF} AND id = ?"
            row = connection.execute(query, (*key, item)).fetchone()
            sums = connection.execute(_SUMS, key).fetchone()
            if row is None or sums is None:
                raise KeyError(item)
            self._touch(connection, *key)
            connection.execute(f"DELETE {_OF} AND position = ?", (*key, row[0]))
            left = sums[0] - 1, sums[1] - row[1], sums[2]
            connection.execute(_SET_SUMS, (*left, *key))


def num_bytes_of(row: Row) -> int:
    return len(row[0]) + len(row[1])


def row_of(item: dict[str, Any]) -> Row:
    given = item.get("id")
    is_id = isinstance(given, str) and given.isascii() and 0 < len(given) <= MAX_ID_CHARS
    rest = {key: value for key, value in item.items() if key != "id"}
    return str(given) if is_id else "", json.dumps(rest, separators=(",", ":")).encode()


def joined(row: Row) -> bytes:
    """Returns the JSON of an item, from its row."""
    name, body = row
    head = b'{"id":' + json.dumps(name).encode()
    return head + b"}" if body == b"{}" else head + b"," + body[1:]
