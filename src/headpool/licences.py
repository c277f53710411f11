"""Licences by the hub's identifiers: what a model card may say, told without asking the hub."""

import difflib
from collections.abc import Mapping

from headpool.errors import RequestError

KNOWN = (
    "apache-2.0", "mit", "openrail", "openrail++", "bigscience-openrail-m", "creativeml-openrail-m",
    "bigscience-bloom-rail-1.0", "bigcode-openrail-m", "afl-3.0", "artistic-2.0", "bsl-1.0", "bsd", "bsd-2-clause",
    "bsd-3-clause", "bsd-3-clause-clear", "c-uda", "cc", "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0",
    "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0",
    "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0",
    "cdla-sharing-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "wtfpl", "ecl-2.0", "epl-1.0", "epl-2.0",
    "etalab-2.0", "eupl-1.1", "eupl-1.2", "agpl-3.0", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "lgpl", "lgpl-2.1",
    "lgpl-3.0", "lgpl-lr", "isc", "h-research", "intel-research", "lppl-1.3c", "ms-pl", "apple-ascl", "apple-amlr",
    "mpl-2.0", "odc-by", "odbl", "open-mdw", "osl-3.0", "postgresql", "ofl-1.1", "ncsa", "unlicense", "zlib", "pddl",
    "deepfloyd-if-license", "fair-noncommercial-research-license", "llama2", "llama3", "llama3.1", "llama3.2",
    "llama3.3", "llama4", "gemma", "unknown", "other",
)  # fmt: skip
"""What https://huggingface.co/docs/hub/repositories-licenses lists. huggingface_hub has no such list, and the hub's may
have grown since: the way to a newer one is the card itself, which the hub's validator judges.
"""

OTHER = "other"
"""Of a licence with a name of its own."""


def metadata(identifier: str | None, name: str | None) -> Mapping[str, str]:
    """What a card says of a licence that was typed: `license`, and `license_name` of one that is not the hub's.

    Raises RequestError for an identifier that is none of the hub's, and for a name beside one that is.
    """
    if identifier is None:
        if name is not None:
            raise RequestError(f"--license-name {name} is for --license other")
        return {}
    if identifier not in KNOWN:
        near = difflib.get_close_matches(identifier.lower().replace(" ", "-"), KNOWN, n=1)
        hint = f"did you mean {near[0]}? Else" if near else "for a licence of its own"
        raise RequestError(
            f"{identifier!r} is no licence by the hub's identifiers; {hint} --license other --license-name NAME"
        )
    if (identifier == OTHER) != (name is not None):
        needs = "needs --license-name NAME" if name is None else "has its name: leave --license-name out"
        raise RequestError(f"--license {identifier} {needs}")
    return {"license": identifier} | ({} if name is None else {"license_name": name})
