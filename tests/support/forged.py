"""Checkpoints that somebody changed on purpose: with checksums that fit, so that only the values are wrong."""

import hashlib
import json

from fullshard.state.storage.json_file import SEAL, seal


def forge_index(checkpoint, change):
    """Call ``change`` with the values of the index, or with its text to replace, and make everything else fit."""
    text = (checkpoint / "index.json").read_text()
    values = json.loads(text)
    values.pop(SEAL, None)
    changed = change(values)
    forged = changed if isinstance(changed, (str, bytes)) else seal(json.dumps(values, separators=(",", ":")))
    put_index(checkpoint, forged if isinstance(forged, bytes) else forged.encode())


def put_index(checkpoint, content):
    """Write an index, and its size and hash into ``complete.json``."""
    (checkpoint / "index.json").write_bytes(content)
    hashed = {"index_sha256": hashlib.sha256(content).hexdigest()}
    forge_completion(checkpoint, lambda done: done.update(hashed) or done["files"].update({"index.json": len(content)}))


def forge_completion(checkpoint, change):
    """Call ``change`` with the values of ``complete.json``, or with its text to replace, and seal them."""
    values = json.loads((checkpoint / "complete.json").read_text())
    values.pop(SEAL, None)
    changed = change(values)
    forged = changed if isinstance(changed, str) else seal(json.dumps(values))
    (checkpoint / "complete.json").write_text(forged)


def as_version_1(checkpoint):
    """Leave out what the first version of the format did not have."""

    def index(values):
        values.update(version=1)
        del values["serial"]
        return json.dumps(values, separators=(",", ":"))

    forge_index(checkpoint, index)
    forge_completion(checkpoint, lambda done: json.dumps({name: done[name] for name in done if name != "version"}))
