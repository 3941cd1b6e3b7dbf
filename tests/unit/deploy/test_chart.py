"""The chart's manifests: valid by Kubernetes' schemas, with settings that exist, logins of their own and time to drain."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from services.gateway.settings import GatewaySettings
from services.planner.settings import PlannerSettings
from services.runtime.loading import load_settings
from services.up.settings import UpSettings
from services.worker.nodes import Nodes
from services.worker.settings import WorkerServiceSettings
from tests.needs import needs
from tests.unit.deploy.chart import CHART, IMAGE, manifests, notes, values
from tests.unit.deploy.chart_values import EVERYTHING, VARIANTS, WRONG

KUBERNETES = "1.34"  # the first in which resource.k8s.io/v1 is on by default
KINDS = {"gateway": GatewaySettings, "planner": PlannerSettings}
# Kinds of others, which no schema here knows, with the keys of `spec` that we use.
CUSTOM = {
    "LeaderWorkerSet": {"rolloutStrategy", "leaderWorkerTemplate"},
    "HTTPRoute": {"parentRefs", "hostnames", "rules"},
    "PodMonitor": {"selector", "podMetricsEndpoints"},
    "PrometheusRule": {"groups"},
    "ScaledObject": {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers"},
}


POD = {"apiVersion": "v1", "kind": "Pod"}


def pods(changed: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container with its pod."""
    for manifest in manifests(values(**changed)):
        if template := template_of(manifest):
            pod = template["spec"]
            yield from ((container, pod) for container in pod["containers"])


def template_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The template of a manifest's pods; {} without any."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    found: dict[str, Any] = {
        "Deployment": lambda: spec["template"],
        "LeaderWorkerSet": lambda: spec["leaderWorkerTemplate"]["workerTemplate"],
    }.get(kind, dict)()
    return found


def in_group(word: str) -> str:
    """An argument as the second pod of a LeaderWorkerSet's group of two sees it."""
    given = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "baton-wide-0.baton-wide.default"}
    return re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word)


@pytest.mark.parametrize("changed", VARIANTS)
def test_kubernetes_would_take_every_manifest(changed: dict[str, Any]) -> None:
    needs("kubernetes_validate")
    import kubernetes_validate as kubernetes

    made = manifests(values(**changed))
    for manifest in made:
        if manifest["kind"] in CUSTOM:
            assert set(manifest["spec"]) == CUSTOM[manifest["kind"]]
            if template := template_of(manifest):
                kubernetes.validate(
                    POD | template | {"metadata": {"name": "a"} | template["metadata"]}, KUBERNETES, strict=True
                )
        else:
            kubernetes.validate(manifest, KUBERNETES, strict=True)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in made]
    assert len(set(names)) == len(names)


def test_the_schemas_refuse_what_is_wrong() -> None:
    needs("kubernetes_validate")
    import kubernetes_validate as kubernetes

    deployment = manifests(values(), "gateway")[0]
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(deployment, KUBERNETES, strict=True)


@pytest.mark.parametrize("changed", VARIANTS)
def test_pods_have_settings_that_exist_and_time_to_drain(changed: dict[str, Any]) -> None:
    shared = manifests(values(**changed), "config")[0]["data"]
    for container, pod in pods(changed):
        role, *arguments = [in_group(word) for word in container["args"]]
        kind = KINDS.get(role, WorkerServiceSettings)
        own = {entry["name"]: entry.get("value", "10.0.0.1") for entry in container["env"]}
        environment = (shared if "envFrom" in container else {}) | own
        named = {name for name in environment if name != "POD_IP"}
        assert {name.removeprefix("BATON_").lower() for name in named} <= set(kind.model_fields)
        settings = load_settings(kind, command=role, arguments=arguments, environment=environment)
        pre_stop = 5 if "lifecycle" in container else 0
        assert pod.get("terminationGracePeriodSeconds", 30) > getattr(settings, "drain_s", 0) + pre_stop


@pytest.mark.parametrize("changed", VARIANTS)
def test_containers_mount_what_the_pod_has_and_what_their_settings_name(changed: dict[str, Any]) -> None:
    shared = manifests(values(**changed), "config")[0]["data"]
    for container, pod in pods(changed):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        given = (shared if "envFrom" in container else {}) | {
            one["name"]: one.get("value", "") for one in container["env"]
        }
        files = [value for value in given.values() if value.startswith("/")]
        assert all(any(file.startswith(f"{path}/") for path in mounts.values()) for file in files)


def refused(given: dict[str, Any]) -> list[str]:
    """Where helm would refuse values, by the chart's schema."""
    needs("jsonschema")
    import jsonschema

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(given)]


@pytest.mark.parametrize("changed", VARIANTS)
def test_the_schema_of_values_takes_ours(changed: dict[str, Any]) -> None:
    assert refused(values(**changed)) == []


@pytest.mark.parametrize("wrong", WRONG)
def test_the_schema_of_values_refuses_what_is_wrong(wrong: dict[str, Any]) -> None:
    assert len(refused(values(**wrong))) == 1


def test_images_have_a_registry_s_name() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    images = {container["image"] for container, _ in pods({"pair": {"replicas": 1}})}
    assert images == {f"{IMAGE}:{about['appVersion']}-{device}" for device in ("cpu", "cuda")}
    with pytest.raises(ValueError, match=r"image.repository: name the image with its registry"):
        manifests(values(image={"repository": ""}))


def test_the_notes_say_what_must_be_there() -> None:
    told = notes(values(**EVERYTHING))
    wanted = ("our.registry:5000/baton:1.2-cpu", "get pvc baton-models", "ReadOnlyMany or ReadWriteMany")
    wanted += ("tls://nats:4222", "rediss://redis:6379", "the secret baton-users", "secret baton-api-keys")
    assert [words for words in wanted if words not in told] == []
    assert "baton-users" not in notes(values(usersSecret=""))


def test_pods_get_no_login_but_their_own() -> None:
    for container, pod in pods({}):
        (role,) = container["args"]
        (logins,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "logins")
        assert {item["key"].split(".")[0] for item in logins["items"]} == {role}


@pytest.mark.parametrize("changed", VARIANTS)
def test_containers_have_no_privileges_and_no_foreign_variables(changed: dict[str, Any]) -> None:
    for container, pod in pods(changed):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context["allowPrivilegeEscalation"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        # Kubernetes would set BATON_GATEWAY_SERVICE_HOST, an unknown variable that stops every service's start.
        assert pod["enableServiceLinks"] is False
        assert container["resources"]["limits"]["memory"]


def test_only_pods_with_gpus_go_to_their_nodes() -> None:
    given = {"gpuNodes": {"selector": {"gpu": "h200"}, "runtimeClass": "nvidia"}, "pair": {"replicas": 1}}
    for container, pod in pods(given):
        with_gpus = container["image"].endswith("-cuda")
        assert (bool(pod.get("tolerations")), "runtimeClassName" in pod) == (with_gpus, with_gpus)
        assert pod.get("nodeSelector", {}) == ({"gpu": "h200"} if with_gpus else {})


def test_a_worker_gets_one_gpu_unless_it_has_ranks() -> None:
    limits = [container["resources"]["limits"] for container, _ in pods({}) if container["image"].endswith("-cuda")]
    assert {limit["nvidia.com/gpu"] for limit in limits if "nvidia.com/gpu" in limit} == {"1"}


def test_a_pool_says_what_differs_from_the_defaults() -> None:
    own = EVERYTHING["pools"]
    workers = manifests(values(pools=own), "workers")
    made = {one["metadata"]["name"]: one["spec"] for one in workers if one["kind"] == "Deployment"}
    cpu, coder, deep = (made[f"baton-{name}"]["template"]["spec"] for name in ("cpu", "coder", "deep"))
    (on_cpus,), (on_gpus,) = cpu["containers"], coder["containers"]
    assert [one["image"].rpartition("-")[2] for one in (on_cpus, on_gpus)] == ["cpu", "cuda"]
    assert on_cpus["args"] == ["worker", "--threads", "2"]
    assert on_cpus["resources"] == own["cpu"]["resources"]
    assert on_gpus["resources"]["limits"]["nvidia.com/gpu"] == "4"  # one for each rank
    assert deep["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"  # and for each stage
    assert {"name": "BATON_TENSOR_PARALLEL_SIZE", "value": "4"} in on_gpus["env"]
    assert (cpu["affinity"], "podAffinity" in coder["affinity"]) == (own["cpu"]["affinity"], True)
    assert {"name": "BATON_MODEL", "value": "/models/coder"} in on_gpus["env"]


def test_the_stages_of_several_hosts_are_a_group_of_pods_that_start_together() -> None:
    """Each runs the same command with the numbers that its group gives it, and has its part of the GPUs."""
    pools = {"pools": EVERYTHING["pools"]}
    (wide,) = (one for one in manifests(values(**pools), "workers") if one["kind"] == "LeaderWorkerSet")
    group = wide["spec"]["leaderWorkerTemplate"]
    assert (wide["metadata"]["name"], wide["spec"]["replicas"], group["size"]) == ("baton-wide", 3, 2)
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    (container,) = group["workerTemplate"]["spec"]["containers"]
    assert container["args"][:2] == ["worker", "--nnodes"]
    assert Nodes.parse(in_group(container["args"][2])) == Nodes(2, 1, "baton-wide-0.baton-wide.default")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"  # 4 stages of 4 ranks on 2 hosts
    assert {"name": "BATON_NATS_CREDENTIALS", "value": "/logins/worker.nats"} in container["env"]
    scaled = manifests(values(autoscaling={"enabled": True}, **pools), "autoscaling")
    kinds = {one["spec"]["scaleTargetRef"]["name"]: one["spec"]["scaleTargetRef"].get("kind") for one in scaled}
    assert (kinds["baton-wide"], kinds["baton-coder"]) == ("LeaderWorkerSet", None)


def test_a_pool_of_vectors_has_its_own_login_and_number_and_no_redis() -> None:
    """It needs neither Redis nor a transport of KV, and the planner doesn't count it."""
    given = {"autoscaling": {"enabled": True}, "usersSecret": "baton-users", "pools": EVERYTHING["pools"]}
    workers = manifests(values(**given), "workers")
    made = {one["metadata"]["name"]: one for one in workers if one["kind"] == "Deployment"}
    spec = made["baton-vectors"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (logins,) = (one["secret"] for one in spec["template"]["spec"]["volumes"] if one["name"] == "logins")
    assert (container["args"], spec["replicas"]) == (["pool"], 2)
    assert [item["key"] for item in logins["items"]] == ["pool.nats"]
    assert not {"BATON_TRANSPORT", "BATON_REDIS_CREDENTIALS"} & {one["name"] for one in container["env"]}
    scaled = [one["metadata"]["name"] for one in manifests(values(**given), "autoscaling")]
    assert "baton-coder" in scaled
    assert "baton-vectors" not in scaled


def test_releases_of_one_namespace_share_nothing() -> None:
    """Names begin with the release's, and selectors have it."""
    made = manifests(values(**EVERYTHING), release="other")
    assert all(one["metadata"]["name"].split("-")[0] == "other" for one in made)
    for one in made:
        if one["kind"] == "Deployment":
            assert one["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "other"


def test_workers_are_ready_when_they_say_so() -> None:
    """By a file that a killed container may leave in its pod: the one of the same worker, which removes it at its start."""
    seen: list[str] = []
    for container, pod in pods({"pair": {"replicas": 1}}):
        if container["args"][0] in ("prefill", "decode"):
            (file,) = (one["value"] for one in container["env"] if one["name"] == "BATON_READY_FILE")
            assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", file]
            assert sum(file in json.dumps(other) for other in pod["containers"]) == 1
            seen.append(file)
        else:
            assert "httpGet" in container["readinessProbe"]
    assert len(seen) == 4


def test_selectors_match_pods() -> None:
    made = manifests(values(**EVERYTHING))
    labels = [template["metadata"]["labels"] for one in made if (template := template_of(one))]
    selectors = []
    for one in made:
        found = one["spec"].get("podSelector") or one["spec"].get("selector") if "spec" in one else None
        selectors += [found.get("matchLabels", found)] if found else []
    assert len(selectors) > 10
    for selector in selectors:
        assert any(selector.items() <= pod.items() for pod in labels), selector


def test_autoscaled_are_deployments_without_a_number_of_their_own() -> None:
    made = manifests(values(autoscaling={"enabled": True}))
    deployments = {one["metadata"]["name"]: one for one in made if one["kind"] == "Deployment"}
    scaled = [one for one in made if one["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]
    assert {one["spec"]["scaleTargetRef"]["name"] for one in scaled} == {
        "baton-gateway",
        "baton-prefill",
        "baton-decode",
    }
    for one in scaled:
        assert "replicas" not in deployments[one["spec"]["scaleTargetRef"]["name"]]["spec"]
        for trigger in one["spec"].get("triggers", []):
            assert set(trigger["metadata"]) - {"ignoreNullValues"} == {"serverAddress", "query", "threshold"}
            # A scrape that is missing must not read as "none is wanted".
            query, lost_is_none = trigger["metadata"]["query"], trigger["metadata"].get("ignoreNullValues", "true")
            assert query.endswith("or vector(0)") or lost_is_none == "false"


def test_the_rules_are_those_of_deploy_prometheus() -> None:
    made = {one["metadata"]["name"]: one for one in manifests(values(monitoring={"enabled": True}), "monitoring")}
    for name in ("rules", "alerts"):
        shipped = yaml.safe_load((CHART.parents[1] / "prometheus" / f"{name}.yml").read_text(encoding="utf-8"))
        assert made[f"baton-{name}"]["spec"] == shipped


def test_the_kserve_runtime_starts_with_settings_that_exist_and_has_time_to_drain() -> None:
    folder = CHART.parents[1] / "kserve"
    runtime = yaml.safe_load((folder / "runtime.yaml").read_text(encoding="utf-8"))
    service = yaml.safe_load((folder / "service.yaml").read_text(encoding="utf-8"))
    (container,) = runtime["spec"]["containers"]
    command, *arguments = container["args"]
    environment = {entry["name"]: entry.get("value", "key") for entry in container["env"]}
    settings = load_settings(UpSettings, command=command, arguments=arguments, environment=environment).shared_out()
    predictor = service["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] > settings.drain_s
    assert predictor["enableServiceLinks"] is False
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor["model"]["modelFormat"]["name"] in {
        one["name"] for one in runtime["spec"]["supportedModelFormats"]
    }
    assert {settings.port} == {port["containerPort"] for port in container["ports"]}
    assert all(
        container[probe]["httpGet"]["port"] == settings.port
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    )
    assert settings.prefills.most + settings.decodes.most == int(container["resources"]["limits"]["nvidia.com/gpu"])


def test_the_chart_s_readme_is_what_its_values_say() -> None:
    rendered = runpy.run_path(str(CHART.parent / "make_readme.py"))["rendered"]()
    assert (CHART / "README.md").read_text(encoding="utf-8") == rendered, "run python deploy/helm/make_readme.py"
