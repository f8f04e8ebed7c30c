"""docs/explain.md says what each term of a routing cost is, as the table of terms does."""

from tests.docs.terms import PAGE, with_terms


def test_the_table_of_terms_is_up_to_date() -> None:
    """If this fails: `python -m tests.docs.terms`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_terms(page) == page
