"""Token, host names, methods, paths and headers of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from megarl.commands.view.access import allowed_names
from tests.commands.view.conftest import TOKEN, Open
from tests.support.viewed_runs import make_run

PATHS = ["/", "/static/app.js", "/api/runs", "/api/runs/0/sample?step=1&offset=0"]


@pytest.fixture
def page(tmp_path: Path, open_page: Open) -> TestClient:
    make_run(tmp_path / "run", 1)
    return open_page(tmp_path / "run")


def send(page: TestClient, path: str) -> Any:
    """Send a request with exactly this path, which `page.get` would normalize."""
    request = page.build_request("GET", "http://127.0.0.1:8421/")
    request.url = type(request.url)("http://127.0.0.1:8421", raw_path=path.encode())
    return page.send(request)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("authorization", ["", "Bearer ", "Bearer the-tokem", "Basic the-token", "Bearer the-token2"])
def test_nothing_is_served_without_the_token(page: TestClient, path: str, authorization: str) -> None:
    assert page.get(path).status_code == 200
    refused = page.get(path, headers={"Authorization": authorization})
    assert refused.status_code == 403 and "token" in refused.text and "apples" not in refused.text


def test_the_address_with_the_token_sets_a_cookie_and_hides_the_token(page: TestClient) -> None:
    page.headers.pop("Authorization")
    answer = page.get(f"/?a=1&token={TOKEN}&b=%26")
    assert answer.status_code == 303 and answer.headers["location"] == "/?a=1&b=%26"
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("megarl_view_8421=the-token;") and "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert page.get("/api/runs").status_code == 200, "the client has kept the cookie"
    page.cookies.clear()
    page.cookies.set("megarl_view_8421", "another")
    assert page.get("/api/runs").status_code == 403


@pytest.mark.parametrize("other", ['a={"x":1}', "nameless", "a=\xe9", "a b=c", "=", '"', "a=[1,2]; a:b=c"])
def test_cookies_of_other_servers_do_not_hide_the_token(page: TestClient, other: str) -> None:
    page.headers.pop("Authorization")
    for token, status in ((TOKEN, 200), ("another", 403)):
        own = f"megarl_view_8421={token}"
        for cookies in (f"{other}; {own}", f"{own}; {other}"):
            assert page.get("/api/runs", headers={"Cookie": cookies.encode("latin-1")}).status_code == status
    assert page.get("/api/runs", headers={"Cookie": other.encode("latin-1")}).status_code == 403


def test_a_wrong_token_in_the_address_sets_no_cookie(page: TestClient) -> None:
    for token in ("", "wrong", "the-token%00", "%ff"):
        answer = page.get(f"/?token={token}")
        assert answer.status_code == 403 and "set-cookie" not in answer.headers, token


@pytest.mark.parametrize(
    ("path", "location"), [("//evil.example/", "/evil.example/"), ("/\\evil.example", "/%5Cevil.example")]
)
def test_the_redirect_stays_on_this_server(page: TestClient, path: str, location: str) -> None:
    assert send(page, f"{path}?token={TOKEN}").headers["location"] == location


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8421", True),
        ("localhost:9000", True),  # SSH may forward another port
        ("LOCALHOST", True),
        ("[::1]:8421", True),
        ("evil.example", False),
        ("evil.example:8421", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.5:8421", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_a_page_on_loopback_answers_loopback_names_only(page: TestClient, host: str, allowed: bool) -> None:
    """A name of another site that points to this server (DNS rebinding) is refused, with the right token too."""
    assert page.get("/api/runs", headers={"Host": host}).status_code == (200 if allowed else 400)


def test_an_open_page_answers_its_name_and_addresses(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path / "run", 1)
    page = open_page(tmp_path / "run", host="gpu-node")
    status = {
        host: page.get("/api/runs", headers={"Host": host}).status_code
        for host in ("GPU-node:1", "10.0.0.5", "evil.example")
    }
    assert status == {"GPU-node:1": 200, "10.0.0.5": 200, "evil.example": 400}
    assert not {"0.0.0.0", "::"} & allowed_names("0.0.0.0")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading_is_allowed(page: TestClient, method: str) -> None:
    assert page.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/static/",
        "/../../etc/passwd",
        "/api/runs/../../etc/passwd",
        "/api/runs/0/sample/../../../recipe.resolved.yaml",
        "/recipe.resolved.yaml",
        "/api/runs/-1/overview",
        "/api/runs/1/overview",
    ],
)
def test_paths_outside_the_page_are_not_found(page: TestClient, path: str) -> None:
    answer = send(page, path)
    assert answer.status_code == 404, answer.text


@pytest.mark.parametrize("step", ["../1", "1/../../x", "1.5", "-1", "", "99999999999999999999", "1%00"])
def test_a_step_is_a_number(page: TestClient, step: str) -> None:
    answer = page.get("/api/runs/0/sample", params={"step": step, "offset": "0"})
    assert answer.status_code == 400 and answer.json()["error"]


def test_every_answer_forbids_what_a_sample_could_try(page: TestClient) -> None:
    answers = [page.get(path) for path in (*PATHS, "/none")] + [page.get("/", headers={"Host": "evil.example"})]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert (
            answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
        )
        assert answer.headers["cache-control"] == "no-store" and answer.headers["x-frame-options"] == "DENY"
