"""docs/api/examples.md: each operation of the API, by curl and in Python, from the operations' table.

    python tests/support/api_examples.py

writes it again. A new operation gets its call from its own `example`; Python is httpx where `PYTHON` has
nothing better.
"""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

from mallee.api.openapi.document import template
from mallee.api.openapi.operations import BYTES, OPERATIONS, Operation

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "api" / "examples.md"
URL: Final = "http://127.0.0.1:8000"
# Of operations that mean many things at once: which of them.
QUERIES: Final = {"capsules.delete_many": "?pinned=false", "ui.watch": "?seconds=1"}
OPENAI: Final = f"""\
from openai import OpenAI

client = OpenAI(base_url="{URL}/v1", api_key="none")
"""
OURS: Final = f"""\
from mallee.client import Mallee

with Mallee("{URL}") as client:
"""
PYTHON: Final = {
    "completions": OPENAI
    + """\
made = client.completions.create(model="MODEL", prompt="A mallee is", max_tokens=16, n=2)
print([choice.text for choice in made.choices])""",
    "chat": OPENAI
    + """\
messages = [{"role": "user", "content": "Why do mallees re-sprout?"}]
made = client.chat.completions.create(model="MODEL", messages=messages, max_tokens=16)
print(made.choices[0].message.content)""",
    "models": OPENAI + "print([model.id for model in client.models.list()])",
    "model": OPENAI + "print(client.models.retrieve(model))",
    "capsules.create": OURS
    + """\
    capsule = client.prefill("A long document ...", ttl_s=600)
    print(capsule.id)""",
    "capsules.list": OURS + "    print([capsule.id for capsule in client.capsules()])",
    "capsules.count": OURS + "    print(client.count_capsules())",
    "capsules.delete_many": OURS + "    print(client.delete_capsules(pinned=False))",
    "capsules.rewind": OURS + "    print(client.capsule(capsule).rewind(2).id)",
    "capsules.pin": OURS + "    client.capsule(capsule).pin(ttl_s=600)",
    "capsules.unpin": OURS + "    client.capsule(capsule).unpin()",
    "capsules.delete": OURS + "    client.capsule(capsule).delete()",
    "capsules.fork": OURS
    + """\
    forks = client.capsule(capsule).fork([" Question one?", " Question two?"], max_tokens=16)
    print([branch.text for branch in forks.wait()])""",
}
HEAD: Final = """\
# Examples

A call of each endpoint. `$CAPSULE`, `$REQUEST`, ... (`capsule`, `request` in Python) are
ids from answers before, `MODEL` is the name of the model served. Where API keys are set, add
`-H "authorization: Bearer $KEY"`. Generated from the table of operations by
`python tests/support/api_examples.py`; a test runs all of them.
"""


def heading(operation: Operation) -> str:
    return f"{operation.method} {template(operation.path)}"


def names(operation: Operation) -> list[str]:
    """Parameters of the path."""
    return re.findall(r"{(\w+)}", template(operation.path))


def curl(operation: Operation) -> str:
    path = re.sub(r"{(\w+)}", lambda m: f"${m[1].upper()}", template(operation.path))
    words = ["curl", "" if operation.method == "GET" else f"-X {operation.method}"]
    words.append(f'"{URL}{path}{QUERIES.get(operation.handler, "")}"')
    line = " ".join(word for word in words if word)
    if isinstance(operation.body, str):
        return f"{line} --data-binary @a.file"
    if operation.body is None:
        return line
    body = json.dumps(dict(operation.example), ensure_ascii=False).replace("'", "'\\''")
    return f"{line} \\\n    -H 'content-type: application/json' -d '{body}'"


def python(operation: Operation) -> str:
    if operation.handler in PYTHON:
        return PYTHON[operation.handler]
    path = template(operation.path) + QUERIES.get(operation.handler, "")
    given = f'f"{URL}{path}"' if names(operation) else f'"{URL}{path}"'
    more = ""
    if isinstance(operation.body, str):
        more = ', content=Path("a.file").read_bytes()'
    elif operation.body is not None:
        more = f", json={dict(operation.example)!r}"
    show = "len(answer.content)" if operation.answer == BYTES else "answer.text"
    call = f"answer = httpx.{operation.method.lower()}({given}{more})"
    if operation.method == "DELETE" and more:
        call = f'answer = httpx.request("DELETE", {given}{more})'
    imports = "from pathlib import Path\n\n" if "Path(" in call else ""
    return f"{imports}import httpx\n\n{call}\nprint(answer.status_code, {show})"


def page() -> str:
    parts = [HEAD]
    for operation in OPERATIONS:
        parts.append(f"## {heading(operation)}\n\n{operation.summary}.\n")
        parts.append(f"```bash\n{curl(operation)}\n```\n")
        parts.append(f"```python\n{textwrap.dedent(python(operation))}\n```\n")
    return formatted("\n".join(parts))


def formatted(text: str) -> str:
    """As `make format` would have it, code in it too."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(PAGE), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
