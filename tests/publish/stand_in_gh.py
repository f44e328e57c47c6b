"""A stand-in for the program gh: it records its calls, and does with git what gh does with GitHub.

Repositories are bare ones in $SERVER/OWNER/NAME.git, pull requests and permissions are files in $SERVER.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SERVER = Path(os.environ["SERVER"])
REQUESTS = SERVER / "requests.json"
ME = "me"


def value(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def repository(path: str) -> Path:
    return SERVER / f"{'/'.join(path.split('/')[-2:])}.git"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def fail(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.exit(1)


def fork() -> None:
    origin = next(word for word in sys.argv if word.startswith("repos/")).removesuffix("/forks").removeprefix("repos/")
    name = f"{ME}/{origin.split('/')[1]}"
    if not repository(name).exists():
        subprocess.run(["git", "clone", "--quiet", "--bare", repository(origin), repository(name)], check=True)
    say(name)


def create() -> None:
    head, target = value("--head"), value("--repo")
    owner, _, branch = head.rpartition(":")
    source = f"{owner}/{target.split('/')[-1]}" if owner else target
    found = subprocess.run(["git", "-C", repository(source), "rev-parse", "--verify", f"refs/heads/{branch}"])
    if found.returncode:
        fail("pull request create failed: GraphQL: Head sha can't be blank (createPullRequest)")
    made = json.loads(REQUESTS.read_text()) if REQUESTS.exists() else []
    entry = {"url": f"https://{target}/pull/{len(made) + 1}", "headRepositoryOwner": {"login": owner or "group"}}
    body = sys.stdin.read()
    REQUESTS.write_text(json.dumps([*made, entry | {"branch": branch, "body": body, "title": value("--title")}]))
    say(f"\n{entry['url']}")


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    with (SERVER / "calls.txt").open("a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    failing = (SERVER / "fails").read_text().split() if (SERVER / "fails").exists() else ["none"]
    if set(failing) <= set(words):
        fail("HTTP 502: Bad Gateway for https://user:gho_secretToken@host.example/x gho_secretToken")
    if words[:2] == ["auth", "status"]:
        sys.exit(int((SERVER / "logged-out").exists()))
    elif words[:2] == ["repo", "view"]:
        say((SERVER / f"{words[2].replace('/', ' ')}.json").read_text())
    elif words[0] == "api" and "POST" in words:
        fork()
    elif words[0] == "api" and "user" in words:
        say(ME)
    elif words[:2] == ["pr", "list"]:
        made = json.loads(REQUESTS.read_text()) if REQUESTS.exists() else []
        say(json.dumps([entry for entry in made if entry["branch"] == value("--head")]))
    elif words[:2] == ["pr", "create"]:
        create()
    else:
        fail(f"unknown command {words}")


main()
