"""Tenants as an operator declares them, and the secret behind their salts."""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import Path

import pytest

from kvrelay.cluster.api.tenants import ANONYMOUS, Tenants, load_public_prompts, load_tenants
from kvrelay.cluster.config import Config, ConfigError, load_config
from kvrelay.router.messages import TenantShare

HASH = sha256(b"hashed").hexdigest()


def config_of(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvrelay.toml"
    path.write_text(f'[sessions]\nstate_dir = "{tmp_path}/state"\n{text}')
    return load_config(path, {})


def salts(tenants: Tenants, *keys: str) -> list[bytes]:
    found = [tenants.find(key) for key in keys]
    return [tenant.salt for tenant in found if tenant is not None]


TWO = f"""
[[tenant]]
name = "red"
keys = ["r1", "r2"]
[[tenant]]
name = "blue team"
key_hashes = ["{HASH}"]
"""


def test_without_tenants_there_are_no_keys_and_no_secret(tmp_path: Path) -> None:
    tenants = load_tenants(config_of(tmp_path, ""))
    assert not tenants.key_required
    assert tenants.find(None) is tenants.find("any") is ANONYMOUS
    assert (ANONYMOUS.name, ANONYMOUS.salt) == ("", b"")
    assert not (tmp_path / "state").exists()


def test_each_key_belongs_to_its_tenant(tmp_path: Path) -> None:
    tenants = load_tenants(config_of(tmp_path, TWO))
    assert tenants.key_required
    names = [getattr(tenants.find(key), "name", None) for key in ("r1", "r2", "hashed", "r", "R1")]
    assert names == ["red", "red", "blue team", None, None]
    assert tenants.find(None) is tenants.find("") is tenants.find(HASH) is None
    assert len(set(salts(tenants, "r1", "hashed"))) == 2
    assert all(len(salt) == 16 for salt in salts(tenants, "r1", "hashed"))


def test_the_secret_is_made_once_and_for_the_server_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, TWO)
    first = salts(load_tenants(config), "r1", "hashed")
    path = tmp_path / "state" / "salt.secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert salts(load_tenants(config), "r1", "hashed") == first
    path.unlink()
    assert set(salts(load_tenants(config), "r1", "hashed")).isdisjoint(first)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_servers_that_start_at_once_agree_on_the_secret(tmp_path: Path) -> None:
    config = config_of(tmp_path, TWO)
    found: list[bytes] = []
    start = threading.Barrier(8)

    def load() -> None:
        start.wait(20)
        found.extend(salts(load_tenants(config), "r1"))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_configured_secret_needs_no_file(tmp_path: Path) -> None:
    secret = '[tenants]\nsalt_secret = "sixteen characters"\n'
    first = salts(load_tenants(config_of(tmp_path, secret + TWO)), "r1")
    assert salts(load_tenants(config_of(tmp_path, secret + TWO)), "r1") == first
    other = secret.replace("sixteen", "16 more ")
    assert salts(load_tenants(config_of(tmp_path, other + TWO)), "r1") != first
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("ab" * 32, 0o644, "others may read it (mode 644): chmod 600 it"),
        ("short", 0o600, "it has 5 characters, at least 32 are expected"),
        ("", 0o600, "it has 0 characters"),
    ],
)
def test_a_secret_that_is_none_is_an_error(
    tmp_path: Path, content: str, mode: int, said: str
) -> None:
    path = tmp_path / "state" / "salt.secret"
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        load_tenants(config_of(tmp_path, TWO))
    assert str(caught.value).startswith(f"{path}: {said}")


def test_more_tenants_may_be_in_a_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text('[[tenant]]\nname = "green"\nkeys = ["g"]\n')
    tenants = load_tenants(config_of(tmp_path, '[tenants]\nfile = "tenants.toml"\n' + TWO))
    assert [getattr(tenants.find(key), "name", None) for key in ("r1", "g")] == ["red", "green"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no [[tenant]] in it"),
        ("x = 1", "x: only [[tenant]] may be in a tenants' file"),
        ("[[tenant]]", "tenant 1.name is missing"),
        ("[[tenant", "not TOML"),
    ],
)
def test_a_tenants_file_that_is_none_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tenants(config_of(tmp_path, '[tenants]\nfile = "tenants.toml"\n'))
    assert str(caught.value).startswith(f"{path}: {said}")
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        load_tenants(config_of(tmp_path, '[tenants]\nfile = "tenants.toml"\n'))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[tenant]]\nname = ""\nkeys = ["k"]', "tenant 1.name = '': expected a name of 1 to 128"),
        ('[[tenant]]\nname = " x"\nkeys = ["k"]', "tenant 1.name = ' x': expected a name"),
        ('[[tenant]]\nkeys = ["sesame"]', "tenant 1.name is missing"),
        ('[[tenant]]\nname = "a"', "tenant 1 (a) has neither keys nor key_hashes"),
        ('[[tenant]]\nname = "a"\nkeys = "sesame"', "tenant 1.keys = ...: expected a list of text"),
        ('[[tenant]]\nname = "a"\nkey = "sesame"', "tenant 1.key is not a setting; did you mean"),
        ('[[tenant]]\nname = "a"\nkeys = [""]', "tenant 'a': a key has to be printable ASCII"),
        ('[[tenant]]\nname = "a"\nkeys = ["open sesame"]', "tenant 'a': a key has to be printable"),
        ('[[tenant]]\nname = "a"\nkey_hashes = ["sesame"]', "tenant 'a': a key hash has to be a"),
        (TWO + '[[tenant]]\nname = "red"\nkeys = ["sesame"]', "tenant 'red' is there twice"),
        (TWO + '[[tenant]]\nname = "x"\nkeys = ["r2"]', "tenants 'red' and 'x' have a key in comm"),
        (TWO + '[[tenant]]\nname = "x"\nkeys = ["hashed"]', "tenants 'blue team' and 'x' have a"),
        ('tenant = "sesame"', "tenant: expected tables, each beginning with [[tenant]]"),
        ('[tenants]\nsalt_secret = "sesame"', "tenants.salt_secret = ...: expected at least 16"),
        ('[tenants]\npublic_prompts = "Hi"', "tenants.public_prompts = 'Hi': expected a list of"),
        ("[tenants]\npublic_prompts = [1]", "tenants.public_prompts = [1]: expected a list of"),
    ],
)
def test_what_is_wrong_with_tenants_is_said_without_showing_a_key(
    tmp_path: Path, text: str, said: str
) -> None:
    text = text if text.startswith(("[", "\n")) else f"\n{text}"
    path = tmp_path / "kvrelay.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tenants(load_config(path, {"sessions.state_dir": str(tmp_path / "state")}))
    assert said in str(caught.value)
    assert "sesame" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_public_prompts_come_from_the_configuration_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("Be brief.\nBe kind.\n")
    text = '[tenants]\npublic_prompts = ["Be good."]\npublic_prompt_files = ["one.txt"]\n'
    found = load_public_prompts(config_of(tmp_path, text))
    assert found == ("Be good.", "Be brief.\nBe kind.")
    (tmp_path / "one.txt").write_text("\n")
    with pytest.raises(ConfigError, match="a public prompt is empty"):
        load_public_prompts(config_of(tmp_path, text))
    (tmp_path / "one.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"one\.txt: not UTF-8"):
        load_public_prompts(config_of(tmp_path, text))
    (tmp_path / "one.txt").unlink()
    with pytest.raises(ConfigError, match=r"one\.txt: No such file"):
        load_public_prompts(config_of(tmp_path, text))


def test_the_state_directory_is_the_users_where_none_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Config().sessions
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert sessions.state_path == tmp_path / "kvrelay"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert sessions.state_path == Path("/home/somebody/.local/state/kvrelay")


def test_a_tenant_has_the_share_that_it_was_given(tmp_path: Path) -> None:
    text = """
[[tenant]]
name = "red"
keys = ["r"]
weight = 2.5
max_concurrent = 8
max_queued = 50
min_priority = -10
[[tenant]]
name = "blue"
keys = ["b"]
"""
    tenants = load_tenants(config_of(tmp_path, text))
    red, blue = tenants.find("r"), tenants.find("b")
    assert red is not None
    assert blue is not None
    assert (red.share, red.min_priority) == (TenantShare(2.5, 8, 50), -10)
    assert (blue.share, blue.min_priority) == (TenantShare(), 0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("weight = 0", "tenant 1.weight = 0: expected at least 0.01"),
        ("max_queued = -1", "tenant 1.max_queued = -1: expected at least 0"),
        ("min_priority = 101", "tenant 1.min_priority = 101: expected at most 100"),
    ],
)
def test_a_share_that_is_none_is_named(tmp_path: Path, setting: str, said: str) -> None:
    text = f'[[tenant]]\nname = "red"\nkeys = ["r"]\n{setting}\n'
    with pytest.raises(ConfigError, match=said):
        load_tenants(config_of(tmp_path, text))
