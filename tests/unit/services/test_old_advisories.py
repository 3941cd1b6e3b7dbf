"""The offline look-up of pins: what is in the list is found, and nothing else."""

from __future__ import annotations

from services.old_advisories import known, pins

ADVISORIES = {
    "urllib3": [{"specs": ["<1.26.5", "==2.0"], "cve": "CVE-1", "id": "x", "advisory": "one\n  two"}],
    "ruamel-yaml": [{"specs": [">0"], "cve": None, "id": "pyup.io-7", "advisory": "taken over"}],
}


def test_a_pin_is_found_by_its_version_and_by_any_spelling_of_its_name() -> None:
    pinned = pins("# a comment\nurllib3==1.26.4  # old\nRuamel.Yaml==0.1 ; python_version > '3'\nnot-pinned>=3\n")
    assert pinned == {"urllib3": "1.26.4", "ruamel-yaml": "0.1"}
    assert list(known(pinned, ADVISORIES)) == [
        "urllib3 1.26.4: CVE-1 one two",
        "ruamel-yaml 0.1: pyup.io-7 taken over",
    ]


def test_a_version_that_no_advisory_names_is_not_found() -> None:
    assert list(known({"urllib3": "1.26.5", "redis": "5.0"}, ADVISORIES)) == []
