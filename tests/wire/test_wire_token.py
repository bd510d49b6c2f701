"""A token that is mistyped anywhere is told as such."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import InvalidValue
from evener.wire.refusals import BadToken
from evener.wire.token import Token

secrets = st.binary(min_size=16, max_size=16)
fingerprints = st.none() | st.binary(min_size=32, max_size=32)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
TOKEN = Token(secret=bytes(range(16)), fingerprint=bytes(range(100, 132)))


def test_a_literal_token() -> None:
    token = Token(secret=bytes(16), fingerprint=None)
    assert token.text == "evener1-AAAAAAAAAAAAAAAAAAAAAGVMPhQ"
    assert token.insecure
    assert not TOKEN.insecure


@settings(deadline=None)
@given(secrets, fingerprints)
def test_text_and_token_are_the_same_thing(secret: bytes, fingerprint: bytes | None) -> None:
    token = Token(secret=secret, fingerprint=fingerprint)
    assert Token.parse(token.text) == token
    assert len(token.text) == (35 if fingerprint is None else 78)


@settings(deadline=None)
@given(secrets, fingerprints, st.data())
def test_one_wrong_character_anywhere_is_noticed(secret: bytes, fingerprint: bytes | None, data: st.DataObject) -> None:
    text = Token(secret=secret, fingerprint=fingerprint).text
    place = data.draw(st.integers(0, len(text) - 1))
    wrong = data.draw(st.sampled_from(LETTERS + " .é").filter(lambda letter: letter != text[place]))
    with pytest.raises(BadToken, match="copy the whole token"):
        Token.parse(text[:place] + wrong + text[place + 1 :])


def test_the_last_character_counts_although_not_all_its_bits_carry_anything() -> None:
    text = TOKEN.text
    for wrong in set(LETTERS) - {text[-1]}:
        with pytest.raises(BadToken):
            Token.parse(text[:-1] + wrong)


@settings(deadline=None)
@given(secrets, fingerprints, st.data())
def test_a_token_cut_short_is_noticed(secret: bytes, fingerprint: bytes | None, data: st.DataObject) -> None:
    text = Token(secret=secret, fingerprint=fingerprint).text
    with pytest.raises(BadToken):
        Token.parse(text[: data.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "begins with evener1-"),
        ("evener2-AAAA", "begins with evener1-, got 'evener2-AAAA'"),
        (TOKEN.text + "AAAA", "35 or 78 characters, got 82"),
        (TOKEN.text[:-5] + "AAAAA", "mistyped: its last characters"),
        ("evener1-****", "characters or a length that no token has"),
    ],
)
def test_the_sentence_says_what_is_wrong(text: str, rule: str) -> None:
    with pytest.raises(BadToken, match=rule):
        Token.parse(text)


def test_line_breaks_of_a_terminal_do_not_matter() -> None:
    text = TOKEN.text
    assert Token.parse(f"  {text[:30]}\r\n  {text[30:]}\n") == TOKEN


def test_printing_a_token_by_mistake_does_not_show_its_secret() -> None:
    assert repr(TOKEN) == str(TOKEN) == "Token(6465666768696a6b, secret hidden)"


@pytest.mark.parametrize(("secret", "fingerprint"), [(b"", None), (bytes(17), None), (bytes(16), b"short")])
def test_secrets_and_fingerprints_have_one_length(secret: bytes, fingerprint: bytes | None) -> None:
    with pytest.raises(InvalidValue, match="bytes of the"):
        Token(secret=secret, fingerprint=fingerprint)
