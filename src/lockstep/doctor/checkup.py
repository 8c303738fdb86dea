"""The complete checkup: the table of checks, and the trials of backends, which take seconds."""

import platform
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lockstep.doctor import backends, environment, gpus, machine, versions
from lockstep.doctor.addresses import judge_tf_config, look_at_tf_config
from lockstep.doctor.check import Check, Finding, Rating, Sources, fine, in_section, judge, look, worst
from lockstep.doctor.environment import look_at_shell
from lockstep.doctor.gpus import look_at_gpus
from lockstep.doctor.versions import look_at_installation
from lockstep.launcher.backend import BACKENDS
from lockstep.system.cuda import LISTED
from lockstep.system.environment import LEGACY_KERAS

CHECKS: Mapping[str, Sequence[Check[Any]]] = {
    "versions": (
        Check("Python", look_at_installation, versions.judge_python),
        Check("Lockstep", look_at_installation, versions.judge_lockstep),
        Check("Keras", look_at_installation, versions.judge_keras),
        *(Check(name, look_at_installation, partial(versions.judge_backend, name)) for name in BACKENDS),
        Check("chosen backend", look_at_installation, versions.judge_choice),
        Check("requirements", look_at_installation, versions.judge_requirements),
    ),
    "gpus": (
        Check("driver", look_at_gpus, gpus.judge_driver),
        Check("GPUs", look_at_gpus, gpus.judge_absence),
        Check(LISTED, look_at_gpus, gpus.judge_list),
        Check("GPU 0, GPU 1 ...", look_at_gpus, gpus.judge_gpus),
    ),
    "machine": (
        Check("system", machine.look_at_system, machine.judge_system, ("system", "processor", "kernel")),
        Check("instructions", machine.look_at_instructions, machine.judge_instructions),
        Check("cores", machine.look_at_cores, machine.judge_cores, ("all", "usable", "quota", "load")),
        Check("memory", machine.look_at_memory, machine.judge_memory, ("total", "available", "room")),
        Check(
            "shared memory", machine.look_at_shared_memory, machine.judge_shared_memory, ("bytes", "fault")
        ),
        Check("/dev/shm", machine.look_at_shared_files, machine.judge_shared_files, ("free", "fault")),
        Check("open files", machine.look_at_limits, machine.judge_open_files, ("soft", "hard")),
        Check(
            "processes and threads",
            machine.look_at_limits,
            machine.judge_threads,
            ("user_left", "group_left"),
        ),
        Check("disk", machine.look_at_disk, machine.judge_disk, ("free", "fault")),
        Check(
            "monotonic clock",
            machine.look_at_clocks,
            machine.judge_monotonic_clock,
            ("source", "seconds_a_reading", "seconds_back"),
        ),
        Check("wall clock", machine.look_at_clocks, machine.judge_wall_clock, ("now", "installed")),
    ),
    "environment": (
        Check(LISTED, look_at_shell, environment.judge_visible_gpus),
        *(
            Check(name, look_at_shell, partial(environment.judge_effect, name))
            for name in environment.EFFECTS
        ),
        *(
            Check(name, look_at_shell, partial(environment.judge_platform, name))
            for name in environment.PLATFORMS
        ),
        *(
            Check(name, look_at_shell, partial(environment.judge_fraction, name))
            for name in environment.FRACTIONS
        ),
        Check(LEGACY_KERAS, look_at_shell, environment.judge_legacy_keras),
        Check("PYTHONPATH", look_at_shell, environment.judge_python_path),
        Check("current folder", look_at_shell, environment.judge_current_folder),
        Check("LD_PRELOAD", look_at_shell, environment.judge_preload),
        Check("proxies", look_at_shell, environment.judge_proxies),
        Check("LOCKSTEP_*", look_at_shell, environment.judge_worker_variables),
        Check("SLURM_*", look_at_shell, environment.judge_slurm),
        Check("TF_CONFIG", look_at_tf_config, judge_tf_config),
    ),
}
"""By section: what a check examines, its look, its judgement, and the facts that programs get."""
_NO_VARIABLE = fine("no variable that affects a job is set")
_UNTRAINED = Finding(Rating.FINE, "the failures above would make it fail", "fix the failures above first")
_ORDER = ("versions", "gpus", "backends", "machine", "environment")


def examine(sources: Sources, say: backends.Say, *, train: bool) -> list[Finding]:
    """Return all findings, section by section.

    Args:
        sources: the sources of the looks.
        say: called with a line on what the checkup waits for.
        train: whether to train for a second at the end if no check has failed.
    """
    # Other systems lack calls that the other looks at a machine need.
    checks = CHECKS if platform.system() == "Linux" else {**CHECKS, "machine": CHECKS["machine"][:1]}
    probes = backends.probes(filter(sources.is_importable, BACKENDS), sources.environment)
    with backends.running(probes, sources, say) as wait:
        # Meanwhile, the probes import the backends.
        facts = look((check for group in checks.values() for check in group), sources)
        if probes:
            say(f"testing {', '.join(probes)}; this takes a few seconds")
        results = wait()
    findings = {section: judge(section, group, facts) for section, group in checks.items()}
    chosen = facts[look_at_installation].chosen
    findings["backends"] = [
        finding
        for name, result in results.items()
        for finding in backends.judge_probe(
            name, backends.ProbeReport.of(result), facts[look_at_gpus], chosen=name == chosen
        )
    ]
    if not findings["environment"]:
        findings["environment"] = in_section("environment", "variables", [_NO_VARIABLE])
    rows = [finding for section in _ORDER for finding in findings[section]]
    if not train:
        return rows
    if chosen is None or worst(rows) is Rating.FAILURE:
        return [*rows, *in_section("training", "not tested", [_UNTRAINED])]
    instructions = facts[machine.look_at_instructions]
    rows += backends.examine_limit(chosen, instructions, sources, say)
    return [*rows, *backends.examine_training(chosen, sources, say)]
