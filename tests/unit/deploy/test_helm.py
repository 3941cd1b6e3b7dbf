"""The chart by helm itself: it renders what our tests render, refuses wrong values, and packs the rules that are links here."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.chart import CHART, IMAGE, manifests, notes, values
from tests.unit.deploy.chart_values import VARIANTS, WRONG

pytestmark = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm: make chart")


def helm(*words: object) -> subprocess.CompletedProcess[str]:
    """Run helm; it needs no cluster for what is asked here."""
    return subprocess.run(["helm", *map(str, words)], capture_output=True, text=True, timeout=60)


def written(changed: dict[str, Any], folder: Path) -> Path:
    """A file of values, as people have one: with an image's name."""
    file = folder / "values.yaml"
    file.write_text(
        yaml.safe_dump(changed | {"image": {"repository": IMAGE} | changed.get("image", {})}), encoding="utf-8"
    )
    return file


def rendered(chart: Path, changed: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    done = helm("template", "baton", chart, "--values", written(changed, folder))
    assert done.returncode == 0, done.stderr
    return by_name([one for one in yaml.safe_load_all(done.stdout) if one is not None])


def by_name(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(made, key=lambda one: (one["kind"], one["metadata"]["name"]))


@pytest.mark.parametrize("changed", VARIANTS)
def test_helm_renders_what_our_tests_see(changed: dict[str, Any], tmp_path: Path) -> None:
    assert rendered(CHART, changed, tmp_path) == by_name(manifests(values(**changed)))


@pytest.mark.parametrize("changed", VARIANTS)
def test_helm_finds_nothing_to_complain_of(changed: dict[str, Any], tmp_path: Path) -> None:
    done = helm("lint", "--strict", CHART, "--values", written(changed, tmp_path))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("wrong", WRONG)
def test_helm_refuses_wrong_values(wrong: dict[str, Any], tmp_path: Path) -> None:
    done = helm("template", "baton", CHART, "--values", written(wrong, tmp_path))
    assert done.returncode == 1
    assert "values don't meet the specifications of the schema" in done.stderr


def test_without_an_image_s_name_helm_says_how_to_give_one() -> None:
    done = helm("template", "baton", CHART)
    assert done.returncode == 1
    assert "image.repository: name the image with its registry" in done.stderr


@pytest.mark.parametrize("changed", VARIANTS)
def test_helm_s_notes_are_those_of_our_tests(changed: dict[str, Any], tmp_path: Path) -> None:
    """Helm shows notes only where there is a cluster, so they are a manifest here."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    file = chart / "templates" / "NOTES.txt"
    told = textwrap.indent(file.read_text(encoding="utf-8"), "    ")
    head = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata:\n  told: |\n"
    file.with_name("notes.yaml").write_text(head + told, encoding="utf-8")
    (seen,) = (one for one in rendered(chart, changed, tmp_path) if one["metadata"]["name"] == "notes")
    assert seen["data"]["told"].rstrip() == notes(values(**changed)).rstrip()


def test_a_package_has_the_rules_of_deploy_prometheus(tmp_path: Path) -> None:
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    changed = {"monitoring": {"enabled": True}}
    assert rendered(package, changed, tmp_path) == by_name(manifests(values(**changed)))
