"""infra/k8s: valid for Kubernetes and for Ray Serve, and closed where it says it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from ray.serve.schema import ServeDeploySchema

from criticalkv.services import app as application
from criticalkv.services.cluster import LOCAL_ENV, TIMEOUT_MARGIN_S
from criticalkv.services.gateway.edge import WRITE_TIMEOUT_VARIABLE
from criticalkv.shared.config import Config, load_config
from criticalkv.shared.malloc import ONE_HEAP

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "infra" / "k8s"
NOT_APPLIED = {"kustomization.yaml", "image-fields.yaml", "secrets.yaml"}
COMPONENTS = ("head", "gateway", "prefill", "decode", "store", "valkey")
OURS = "criticalkv:0.1.0"
Document = dict[str, Any]


def read(name: str) -> list[Document]:
    return [d for d in yaml.safe_load_all((FOLDER / name).read_text()) if d]


FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
APPLIED = [d for name in FILES if name not in NOT_APPLIED for d in read(name)]
DIRECT_READS = read("direct-reads/network.yaml")
SECRETS = {d["metadata"]["name"]: set(d["stringData"]) for d in read("secrets.yaml")}
[RAY] = [d["spec"] for d in APPLIED if d["kind"] == "RayService"]
CLUSTER = RAY["rayClusterConfig"]
GROUPS = {g["groupName"]: g for g in CLUSTER["workerGroupSpecs"]}
SERVE = yaml.safe_load(RAY["serveConfigV2"])


def of_kind(kind: str) -> dict[str, Document]:
    return {d["metadata"]["name"]: d for d in APPLIED if d["kind"] == kind}


def templates() -> dict[str, Document]:
    """The pods of every workload, by component."""
    found = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
    found += [d["spec"] for kind in ("Deployment", "StatefulSet") for d in of_kind(kind).values()]
    pods = [spec["template"] for spec in found]
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in pods}


PODS = templates()
CONTAINERS = [(name, c) for name, pod in PODS.items() for c in pod["spec"]["containers"]]


def ids(values: list[Any]) -> list[str]:
    return [f"{d['kind']}/{d['metadata']['name']}" for d in values]


KNOWN = [d for d in [*APPLIED, *DIRECT_READS, *read("secrets.yaml")] if d["kind"] != "RayService"]


@pytest.mark.parametrize("document", KNOWN, ids=ids(KNOWN))
def test_kubernetes_accepts_it(document: Document) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("component", COMPONENTS)
def test_kubernetes_accepts_the_pods(component: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **PODS[component]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_a_misspelt_field_is_refused() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {"contaners": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_every_file_is_applied_or_said_not_to_be() -> None:
    [kustomization] = read("kustomization.yaml")
    assert set(kustomization["resources"]) | NOT_APPLIED == set(FILES)
    assert set(kustomization["configurations"]) <= NOT_APPLIED
    assert set(PODS) == set(COMPONENTS)


def test_ray_serve_accepts_the_application() -> None:
    schema = ServeDeploySchema.model_validate(SERVE)
    [app] = schema.applications
    assert app.import_path == f"{application.__name__}:app_builder"
    assert application.app_builder(app.args)


def test_rays_version_is_the_one_that_is_installed_and_pinned() -> None:
    [pin] = [r for r in map(Requirement, requires("criticalkv") or ()) if r.name == "ray"]
    assert CLUSTER["rayVersion"] in pin.specifier
    assert CLUSTER["authOptions"]["mode"] == "token"


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(overrides=SERVE["applications"][0]["args"])


def test_it_scales_as_serve_yaml_does(config: Config) -> None:
    file = yaml.safe_load((ROOT / "infra" / "serve.yaml").read_text())
    plain = load_config(overrides=file["applications"][0]["args"])
    assert config.prefill.autoscaling == plain.prefill.autoscaling
    assert config.decode.autoscaling == plain.decode.autoscaling
    assert SERVE["http_options"]["request_timeout_s"] == file["http_options"]["request_timeout_s"]
    assert CLUSTER["enableInTreeAutoscaling"]


@pytest.mark.parametrize("name", ["prefill", "decode", "gateway"])
def test_a_groups_pods_hold_one_replica_each(config: Config, name: str) -> None:
    group, part = GROUPS[name], getattr(config, name)
    scaling = getattr(part, "autoscaling", None)
    bounds = (scaling.min_replicas, scaling.max_replicas) if scaling else (1, 1)
    assert (group["minReplicas"], group["maxReplicas"]) == bounds
    assert group["replicas"] == bounds[0]
    # Ray reads it as a string within a string.
    offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
    assert offered == part.ray_resources == {name: 1}
    assert float(group["rayStartParams"]["num-cpus"]) == part.num_cpus
    [container] = PODS[name]["spec"]["containers"]
    assert float(container["resources"]["requests"]["cpu"]) >= getattr(part, "threads", 1)
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_pods_live_until_the_last_stream_has_ended(config: Config) -> None:
    longest = config.gateway.request_timeout_s + TIMEOUT_MARGIN_S
    for name in GROUPS:
        [container] = PODS[name]["spec"]["containers"]
        env = {e["name"]: e.get("value") for e in container["env"]}
        drain = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] or 0)
        assert longest < drain < PODS[name]["spec"]["terminationGracePeriodSeconds"]


def test_the_gateway_asks_for_keys_beyond_loopback(config: Config) -> None:
    assert config.gateway.host == SERVE["http_options"]["host"] == "0.0.0.0"
    assert config.gateway.port == SERVE["http_options"]["port"] == 8000
    assert config.gateway.api_keys_file in mounted("gateway")


def test_rays_processes_have_the_settings_of_a_local_cluster(config: Config) -> None:
    wanted = {**LOCAL_ENV, WRITE_TIMEOUT_VARIABLE: f"{config.gateway.write_timeout_s:g}"}
    wanted.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")  # which keeps it on loopback
    for component in ("head", *GROUPS):
        [container] = PODS[component]["spec"]["containers"]
        assert wanted.items() <= {e["name"]: e["value"] for e in container["env"]}.items()


def test_users_of_valkey_are_those_of_the_example() -> None:
    example = (ROOT / "infra" / "redis-users.acl.example").read_text()
    users = re.findall(r"^user (\S+) on ", example, re.M)
    urls = re.findall(r"rediss://([^:]+):PASSWORD@", (FOLDER / "secrets.yaml").read_text())
    assert urls == users


def mounted(component: str) -> set[str]:
    """Paths of the files that a component's secrets and config maps put there."""
    spec = PODS[component]["spec"]
    maps = {name: set(d["data"]) for name, d in of_kind("ConfigMap").items()}
    holds = {}
    for volume in spec["volumes"]:
        keys = SECRETS.get(volume.get("secret", {}).get("secretName"), set())
        holds[volume["name"]] = keys | maps.get(volume.get("configMap", {}).get("name"), set())
    mounts = spec["containers"][0]["volumeMounts"]
    return {f"{m['mountPath']}/{key}" for m in mounts for key in holds[m["name"]]}


@pytest.mark.parametrize("component", ["gateway", "prefill", "decode"])
def test_files_that_clients_of_the_store_name_are_there(config: Config, component: str) -> None:
    store = config.store
    named = {store.tls_ca, store.tls_client_cert, store.tls_client_key, store.token_file}
    assert "" not in named
    assert named <= mounted(component)
    [service] = [d for d in of_kind("Service").values() if selects(d, "store")]
    port = service["spec"]["ports"][0]["port"]
    assert store.address == f"{service['metadata']['name']}:{port}"
    if component != "gateway":
        assert not any("api-keys" in path for path in mounted(component))


def test_malloc_is_tuned_for_the_store_as_where_a_child_process_is_one() -> None:
    (container,) = PODS["store"]["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env["GLIBC_TUNABLES"] == ONE_HEAP["GLIBC_TUNABLES"]


def test_the_store_listens_with_tls_and_a_token_and_valkey_has_room_for_it() -> None:
    text = of_kind("ConfigMap")["criticalkv-store"]["data"]["store.yaml"]
    store = load_config(overrides=yaml.safe_load(text)).store
    files = {getattr(store, name) for name in type(store).model_fields if name.startswith("tls_")}
    assert {*files, store.token_file, store.redis_ca} <= mounted("store")
    conf = of_kind("ConfigMap")["criticalkv-valkey"]["data"]["valkey.conf"]
    settings = dict(re.findall(r"^([a-z-]+) (.+)$", conf, re.M))
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["port"] == "0"
    named = {v for k, v in settings.items() if k.endswith("file")}
    assert named <= mounted("valkey")
    limit, room = store.memory_limit_mb, int(settings["maxmemory"].removesuffix("mb"))
    assert room >= limit + limit // 4 + 256
    [valkey] = PODS["valkey"]["spec"]["containers"]
    assert int(valkey["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024 > 1.1 * room
    assert of_kind("Deployment")["criticalkv-store"]["spec"]["replicas"] >= 2


@pytest.mark.parametrize(("component", "container"), CONTAINERS, ids=[c[0] for c in CONTAINERS])
def test_a_container_may_do_nothing_that_it_need_not(component: str, container: Document) -> None:
    pod, own = PODS[component]["spec"]["securityContext"], container["securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["runAsUser"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    if component != "head":  # whose autoscaler asks Kubernetes for pods
        assert PODS[component]["spec"]["automountServiceAccountToken"] is False
    assert CLUSTER["autoscalerOptions"]["securityContext"] == own


@pytest.mark.parametrize(("component", "container"), CONTAINERS, ids=[c[0] for c in CONTAINERS])
def test_a_container_is_probed_and_limited(component: str, container: Document) -> None:
    assert container["readinessProbe"]
    assert container["livenessProbe"]
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    expected = OURS if component != "valkey" else "docker.io/valkey/valkey:9.1"
    assert container["image"] == expected


def test_the_image_is_named_once_for_kustomize_too() -> None:
    [kustomization] = read("kustomization.yaml")
    [image] = kustomization["images"]
    assert f"{image['name']}:{image['newTag']}" == OURS
    build = (ROOT / "infra" / "containers" / "Containerfile").read_text()
    assert f"-t {OURS}" in build
    assert f"-t {OURS}-gpu" in build


def selects(document: Document, component: str) -> bool:
    """Whether a Service's, budget's or policy's selector takes a component's pods."""
    spec = document["spec"]
    selector = spec.get("podSelector", spec.get("selector", {}))
    return takes(selector, PODS[component]["metadata"]["labels"])


def takes(selector: Document, labels: dict[str, str]) -> bool:
    plain = {k: v for k, v in selector.items() if isinstance(v, str)}  # of a Service
    wanted = {**plain, **selector.get("matchLabels", {})}
    return wanted.items() <= labels.items() and all(
        e["operator"] == "In" and labels.get(e["key"]) in e["values"]
        for e in selector.get("matchExpressions", [])
    )


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_workload_has_one_disruption_budget(component: str) -> None:
    budgets = [d for d in of_kind("PodDisruptionBudget").values() if selects(d, component)]
    assert len(budgets) == 1


@pytest.mark.parametrize("component", ["head", *GROUPS])
def test_a_budget_of_rays_pods_says_how_many_stay(component: str) -> None:
    """Kubernetes knows of no number that there should be, so that all else allows no drain."""
    [budget] = [d["spec"] for d in of_kind("PodDisruptionBudget").values() if selects(d, component)]
    assert "maxUnavailable" not in budget
    assert type(budget["minAvailable"]) is int
    if component != "head":  # which waits for an administrator
        assert budget["minAvailable"] < GROUPS[component]["minReplicas"]
    assert (budget["minAvailable"] >= 1) == (component in ("head", "decode"))


def secrets_used() -> Iterator[tuple[str, str]]:
    for _, container in CONTAINERS:
        for variable in container.get("env", ()):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield reference["name"], reference["key"]
    for pod in PODS.values():
        for volume in pod["spec"]["volumes"]:
            if secret := volume.get("secret"):
                yield secret["secretName"], ""
    yield CLUSTER["authOptions"]["secretName"], "auth_token"


def test_secrets_are_described_and_have_no_values() -> None:
    used = set(secrets_used())
    assert {name for name, _ in used} == set(SECRETS)
    assert all(key in SECRETS[name] for name, key in used if key)
    for document in read("secrets.yaml"):
        assert set(document["stringData"].values()) == {""}
        assert "data" not in document
    assert not of_kind("Secret")


def test_documented_commands_make_every_secret_with_every_key() -> None:
    text = re.sub(r"\\\n#", "", (FOLDER / "secrets.yaml").read_text())
    commands = re.findall(
        r"^# +kubectl -n criticalkv create secret generic (\S+) (.+)$", text, re.M
    )
    keys = {name: re.findall(r"--from-file=([^=\s]+)=\S+", rest) for name, rest in commands}
    assert {name: set(found) for name, found in keys.items()} == SECRETS
    types = {name: re.findall(r"--type=(\S+)", rest) or ["Opaque"] for name, rest in commands}
    assert types == {d["metadata"]["name"]: [d["type"]] for d in read("secrets.yaml")}
    assert text.count("create secret") == len(commands) + 1  # and why not `secret tls`


def test_no_value_of_a_secret_is_anywhere() -> None:
    for _, container in CONTAINERS:
        for variable in container.get("env", ()):
            assert not re.search("TOKEN|PASSWORD|URL|KEY", variable["name"]) or (
                "secretKeyRef" in variable["valueFrom"]
            )
    for path in [*FOLDER.rglob("*.yaml"), *(ROOT / "infra" / "containers").iterdir()]:
        for url in re.findall(r"rediss?://\S+", path.read_text()):
            assert ":PASSWORD@" in url
        assert "BEGIN" not in path.read_text()


# Who reaches whom, on which port: everything else must fail.
OUTSIDE = {"ingress-nginx", "kuberay-system", "default"}
ALLOWED = {
    ("ingress-nginx", "gateway", 8000),
    ("kuberay-system", "head", 8265),
    *((a, "store", 50051) for a in ("gateway", "prefill", "decode")),
    ("store", "valkey", 6379),
    *(
        (a, b, port)
        for a in ("head", "gateway", "prefill", "decode")
        for b in ("head", "gateway", "prefill", "decode")
        for port in (6379, 8000, 8265, 50051)
    ),
}


def reached(policies: list[Document]) -> set[tuple[str, str, int]]:
    """Which component, or other namespace, the policies let reach which component, and where."""
    return {
        (source, target, port)
        for source in (*COMPONENTS, *OUTSIDE)
        for target in COMPONENTS
        for port in (6379, 8000, 8265, 50051)
        if (source in OUTSIDE or _rule(policies, source, target, port, "Egress"))
        and _rule(policies, target, source, port, "Ingress")
    }


def _rule(policies: list[Document], component: str, peer: str, port: int, direction: str) -> bool:
    said = [
        d["spec"]
        for d in policies
        if direction in d["spec"]["policyTypes"] and selects(d, component)
    ]
    assert said, f"nothing is said about {component}"
    rules = [rule for spec in said for rule in spec.get(direction.lower(), ())]
    return any(_matches(rule, peer, port) for rule in rules)


def _matches(rule: Document, peer: str, port: int) -> bool:
    if "ports" in rule and port not in {p["port"] for p in rule["ports"]}:
        return False
    peers = rule.get("from", rule.get("to"))
    return peers is None or any(_is(one, peer) for one in peers)


def _is(one: Document, peer: str) -> bool:
    if peer in OUTSIDE:
        namespace = {"kubernetes.io/metadata.name": peer}
        return "namespaceSelector" in one and takes(one["namespaceSelector"], namespace)
    return "podSelector" in one and takes(one["podSelector"], PODS[peer]["metadata"]["labels"])


def test_pods_reach_whom_they_must_and_nobody_else() -> None:
    assert reached([*of_kind("NetworkPolicy").values()]) == ALLOWED


def test_direct_reads_let_those_who_read_reach_valkey_and_nobody_else() -> None:
    policies = [*of_kind("NetworkPolicy").values(), *DIRECT_READS]
    assert reached(policies) == ALLOWED | {(a, "valkey", 6379) for a in ("prefill", "decode")}


def test_direct_reads_are_off_and_one_component_turns_them_on(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.store.read_path == "grpc"
    assert "components" not in read("kustomization.yaml")[0]
    [component] = read("direct-reads/kustomization.yaml")
    assert component["resources"] == ["network.yaml"]
    [patch] = component["patches"]
    set_: dict[str, list[Document]] = {}
    for change in yaml.safe_load(patch["patch"]):
        assert change["op"] == "add"
        set_.setdefault(change["path"], []).append(change["value"])
    everywhere = [f"workerGroupSpecs/{i}" for i in range(len(GROUPS))] + ["headGroupSpec"]
    env = "/spec/rayClusterConfig/{}/template/spec/containers/0/env/-"
    assert set(set_) == {env.format(where) for where in everywhere}
    [first, *others] = set_.values()
    assert all(other == first for other in others)
    for variable in first:
        monkeypatch.setenv(variable["name"], variable["value"])
    store = load_config(overrides=SERVE["applications"][0]["args"]).store
    assert store.read_path == "direct"
    assert store.redis_ca in mounted("prefill") & mounted("decode")


def test_everything_is_denied_first() -> None:
    everybody = [
        d["spec"] for d in of_kind("NetworkPolicy").values() if d["spec"]["podSelector"] == {}
    ]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in everybody


def test_the_image_runs_as_nobody_and_is_built_from_this_tree() -> None:
    text = (ROOT / "infra" / "containers" / "Containerfile").read_text()
    last = text.split("\nFROM ")[-1]
    assert "\nUSER 10001:10001\n" in last
    assert "COPY --from=packages" in last
    copied = set(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M))
    assert copied == {"LICENSE README.md pyproject.toml", "kernels", "proto", "services", "shared"}
    assert not re.search(r"(?i)^(ENV|ARG).*(token|password|secret|key)", text, re.M)
