"""docs/engines.md says what becomes of settings and of requests at vLLM, as the code does."""

from tests.docs.engines import PAGE, with_tables


def test_the_tables_are_up_to_date() -> None:
    """If this fails: `python -m tests.docs.engines`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page
