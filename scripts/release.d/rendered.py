"""Checks what the chart renders to with everything turned on: rendered.py FILE PROGRAM"""

import pathlib
import subprocess
import sys
import tempfile

import yaml

# Workers get this long to end after the end of their input and SIGTERM, see docs/RUN.md, in seconds.
WORKERS_END = 15


def main(file, program):
    objects = {found["kind"]: found for found in yaml.safe_load_all(pathlib.Path(file).read_text()) if found}
    kinds = {"ConfigMap", "Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "ScaledObject", "ServiceMonitor"}
    assert set(objects) == kinds, set(objects) ^ kinds
    pod = objects["Deployment"]["spec"]["template"]
    containers = {container["name"]: container for container in pod["spec"]["containers"]}
    oncegate = containers["oncegate"]
    assert set(containers) == {"worker", "oncegate"}

    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "oncegate.toml"
        text = objects["ConfigMap"]["data"]["oncegate.toml"]
        config.write_text(text.replace("/etc/oncegate/secrets/redis", folder))
        (pathlib.Path(folder) / "password").write_text("secret")
        subprocess.run([program, "check", "--strict", "--config", config], check=True)
        # It ends because the broker's name is unknown or its patience is used up, not because of a flag.
        flags = [argument.replace("/etc/oncegate", folder) for argument in oncegate["args"]]
        assert flags[:3] == ["run", "--config", str(config)]
        usage = subprocess.run([program, *flags, "--help"], capture_output=True, text=True)
        assert usage.returncode == 0, usage.stderr

    spec = pod["spec"]
    grace = spec["terminationGracePeriodSeconds"]
    assert grace > 20 + WORKERS_END, grace
    assert not spec["automountServiceAccountToken"]
    secure = oncegate["securityContext"]
    assert secure["runAsNonRoot"] and not secure["allowPrivilegeEscalation"]
    assert secure["readOnlyRootFilesystem"] and secure["capabilities"]["drop"] == ["ALL"] and secure["runAsUser"] == 65532
    assert oncegate["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert oncegate["readinessProbe"]["httpGet"]["path"] == oncegate["startupProbe"]["httpGet"]["path"] == "/readyz"
    mounts = {mount["name"] for mount in oncegate["volumeMounts"]}
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert mounts == volumes == {"config", "secret-redis"}, (mounts, volumes)

    assert {"name": "TZ", "value": "UTC"} in oncegate["env"]
    assert "[::]:9464" in oncegate["args"], "a cluster may have only IPv6"

    labels = pod["metadata"]["labels"]
    for selector in (
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items(), selector
    monitor = objects["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= objects["Service"]["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == objects["Service"]["spec"]["ports"][0]["name"]
    assert "replicas" not in objects["Deployment"]["spec"], "two would set the number of replicas"
    (trigger,) = objects["ScaledObject"]["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == "1000000", trigger["metadata"]
    query = trigger["metadata"]["query"]
    expected = 'oncegate_lag{namespace="payments",service="billing",consumer=~"billing|invoices"}'
    assert query == f"sum(max by (consumer, topic, partition) ({expected}))", query
    assert objects["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    print(f"{len(objects)} objects are fine")


main(*sys.argv[1:])
