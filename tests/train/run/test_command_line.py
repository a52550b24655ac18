"""``python -m train`` from the command line: what it prints, writes, refuses and resumes."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex

import pytest

from train import compare
from train.config.config import MeshSizes
from train.log.log_file import read_log
from train.memory.device_memory import GPUS, usable
from train.memory.step_memory import advice, memory_of
from train.parallel.mesh import make_abstract_mesh
from train.run.command_line import main, parse

TINY = shlex.split(
    "--model.num-layers 1 --mesh.data 2 --mesh.tensor 2 --batch-size 4 --sequence-length 16"
    " --steps 6 --log-interval 2 --overlap ring"
)

#: What a dry run allows XLA to allocate of an H200, and what it says of these bytes.
ALLOCATED = GPUS["H200"].memory
OF_H200 = "that JAX may use of NVIDIA H200, 92% of its memory"


def printed(capsys: pytest.CaptureFixture[str], arguments: list[str], fits: bool = True) -> str:
    with contextlib.nullcontext() if fits else pytest.raises(SystemExit, match=r"^1$"):
        main([*TINY, *arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 2) -> str:
    """The one line on stderr with which the command is refused."""
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, *arguments])
    assert stopped.value.code == status
    return " ".join(capsys.readouterr().err.split())


def test_a_run_prints_its_model_its_log_and_how_to_continue(capsys, tmp_path):
    log = tmp_path / "run.jsonl"
    output = printed(capsys, ["--log-file", str(log), "--checkpoint-dir", str(tmp_path / "saved")])
    assert "mesh: data=2 × fsdp=1 × tensor=2 of cpu devices; 4 more are not used" in output
    assert re.search(r"data: Python .* manual .* sha256 [0-9a-f]{64}", output)
    assert "ring (requested)" in output
    assert " parameters, 1 layer, " in output
    assert re.search(r"steps: 6 of 4 sequences of 16 tokens, \S+ epochs \(", output)
    columns = (
        "step loss grad norm learning rate tokens/s/device TFLOP/s/device MFU memory step time"
        " data wait"
    )
    assert columns in re.sub(" +", " ", output)
    assert re.findall(r"^ +(\d+) +\d\.\d{4} .*n/a", output, re.MULTILINE) == ["1", "2", "4", "6"]
    resume = re.search(r"^to go on: +\S+ -m train (.*)$", output, re.MULTILINE)
    assert resume is not None
    assert resume[1].endswith("--optimizer.decay-steps 11 --steps 12 --resume")
    assert " -m train.compare" in output

    start, *records = read_log(log)
    assert (start["event"], start["configuration"]["steps"]) == ("start", 6)
    assert start["configuration"]["text"]["sha256"] in output
    assert start["hardware"]["mesh"] == {"data": 2, "fsdp": 1, "tensor": 2}
    assert [record["step"] for record in records] == [1, 2, 4, 6]
    assert list(records[0]) == [
        "event", "step", "loss", "grad_norm", "learning_rate", "tokens_per_second_per_device",
        "tflops_per_device", "mfu", "memory_bytes", "step_seconds", "data_seconds",
    ]  # fmt: skip
    # The printed command continues the run.
    main(shlex.split(resume[1]))
    output = capsys.readouterr().out
    assert "resumed from the checkpoint of step 6" in output
    assert "changed since: steps was 6, is 12\n" in output
    events = read_log(log)
    (mark,) = (event for event in events if event["event"] == "resume")
    assert (mark["step"], mark["configuration"]["steps"]) == (6, 12)
    assert [event["step"] for event in events[events.index(mark) :]] == [6, 7, 8, 10, 12]


def test_a_resumed_run_repeats_the_uninterrupted_run(capsys, tmp_path):
    """Bit for bit on the same mesh, within rounding on another; saved files stay the same."""
    log = tmp_path / "log.jsonl"
    every = ["--log-interval", "1", "--save-interval", "2", "--max-to-keep", "9"]
    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--log-file", str(log)]

    def curve() -> list[tuple[int, float, float]]:
        """The steps of the last run alone."""
        steps = [event for event in read_log(log) if event["event"] == "step"]
        log.unlink()
        return [(step["step"], step["loss"], step["grad_norm"]) for step in steps]

    printed(capsys, [*every, *saved])
    whole = curve()
    for newer in ("step_4", "step_6"):
        (tmp_path / "saved" / newer).rename(tmp_path / newer)
    printed(capsys, [*every, *saved, "--resume"])
    assert len(whole) == 6 and curve() == whole[2:]
    (tmp_path / "saved" / "step_6").rename(tmp_path / "again")
    printed(capsys, [*every, *saved, "--resume", "--mesh.fsdp", "2", "--zero", "3"])
    # bfloat16 sums in another order, two steps after the resume.
    assert curve()[-1][:2] == pytest.approx(whole[-1][:2], rel=1e-2)


def test_a_resume_without_steps_trains_the_steps_of_its_run(capsys, tmp_path):
    """The schedule ends with them, and the command that compares has them once."""
    log = tmp_path / "log.jsonl"
    run = [*TINY[: TINY.index("--steps")], "--checkpoint-dir", str(tmp_path / "saved")]
    main([*run, "--steps", "4", "--save-interval", "2"])
    (tmp_path / "saved" / "step_4").rename(tmp_path / "step_4")
    capsys.readouterr()
    main([*run, "--resume", "--log-file", str(log)])
    output = capsys.readouterr().out
    assert "done: 4 steps, loss" in output and "changed since" not in output
    (mark,) = (event for event in read_log(log) if event["event"] == "resume")
    assert mark["configuration"]["steps"] == 4
    assert "--optimizer.decay-steps 11 --steps 8 --resume\n" in output
    compare = output.partition("to compare:")[2]
    assert re.findall(r"--steps\S* ?\d+", compare) == ["--steps 4"]
    # The checkpoint says what the model is, and the mesh is the one that was kept.
    kept = parse(shlex.split(compare.partition("train.compare ")[2].partition(" --a ")[0]))
    assert kept.model == parse(run).model and kept.init_from == str(tmp_path / "saved")
    assert kept.optimizer.learning_rate == parse(run).optimizer.learning_rate
    assert (kept.mesh.data, kept.mesh.tensor) == (2, 2)


@pytest.mark.parametrize("flags", ["--resume", "--resume --steps 2", "--resume-step 2"])
def test_a_resume_of_a_run_with_all_its_steps_ends_well_and_changes_nothing(
    flags, capsys, tmp_path
):
    run = [*TINY[: TINY.index("--steps")], "--checkpoint-dir", str(tmp_path / "saved")]
    main([*run, "--steps", "2", "--log-file", str(tmp_path / "log")])
    if flags.startswith("--resume-step"):
        main([*run, "--steps", "4", "--resume"])

    def contents() -> dict[str, bytes]:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files if path.name != "run.lock"}

    before = contents()
    capsys.readouterr()
    main([*run, *flags.split(), "--log-file", str(tmp_path / "log")])
    nothing, command = capsys.readouterr().out.splitlines()
    sentence = "has 2 steps, as many as the run (--steps); give a larger number to train on"
    assert nothing == f"nothing to train: the checkpoint in {tmp_path / 'saved'} {sentence}"
    assert contents() == before
    # The printed command trains from that step on.
    main(shlex.split(command.partition(" -m train ")[2]))
    output = capsys.readouterr().out
    assert "resumed from the checkpoint of step 2\n" in output and "done: 4 steps" in output


def test_a_resume_with_other_batches_says_what_that_changes(capsys, tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path), "--resume"]
    output = printed(capsys, [*saved[:2], "--steps", "1", "--batch-size", "4"])
    assert "done: 1 step, loss" in output
    output = printed(capsys, [*saved, "--steps", "2"])
    assert "batch_size=" not in output
    output = printed(capsys, [*saved, "--steps", "3", "--batch-size", "8"])
    (line,) = re.findall("^warning: batch_size=.*$", output, re.MULTILINE)
    assert line.startswith("warning: batch_size=8: a step has 8 sequences from here on, and had 4")
    assert line.endswith("give --batch-size 4 to go on as before")


def test_print_config_is_the_whole_configuration(capsys):
    values = json.loads(printed(capsys, ["--print-config", "--preset", "llama3-8b"]))
    assert values["preset"] == "llama3-8b"
    assert values["model"]["features"] == 4096
    assert values["model"]["num_layers"] == 1
    assert values["mesh"] == {"data": 2, "fsdp": 0, "tensor": 2, "context": 1}


def test_dry_run_counts_bytes_on_a_mesh_without_devices(capsys):
    output = printed(
        capsys,
        shlex.split(
            "--dry-run --preset llama3-8b --mesh.data 16 --mesh.tensor 8 --batch-size 32"
            " --sequence-length 4096"
        ),
    )
    lines = dict(re.findall(r"^ *(\S.*?) {2,}([\d,]+) *$", output, re.MULTILINE))
    features, vocabulary, hidden = 4096, 128_256, 14_336
    sharded = 2 * vocabulary * features + features * (2 * 32 + 2 * 8) * 128 + 3 * features * hidden
    parameter_bytes = 4 * (sharded // 8 + 3 * features)
    assert lines["parameters"] == f"{parameter_bytes:,}"
    # Two moments like the parameters, and the step counts of AdamW and its schedule.
    assert lines["optimizer state (adamw)"] == f"{2 * parameter_bytes + 8:,}"
    *parts, total = (int(size.replace(",", "")) for size in lines.values())
    assert total == sum(parts)
    assert f"\nfits into the {ALLOCATED:,} bytes {OF_H200}: {ALLOCATED - total:,} " in output
    assert "[2,512,4096]@[4096,512]" in output
    assert "[2,4096,1792]@[1792,4096]" in output


def test_dry_run_says_that_it_is_of_one_process(capsys):
    arguments = ["--dry-run", "--mesh.tensor", "2", "--batch-size", "8"]
    sentence = "backends and times are those of one process; with several, rings over tensor cannot"
    assert sentence not in printed(capsys, arguments)
    across = "--distributed.tensor-across-processes"
    assert sentence in printed(capsys, [*arguments, across])


def test_dry_run_says_how_to_make_a_model_fit(capsys):
    arguments = "--dry-run --preset llama3-8b --mesh.data 1 --mesh.tensor 1 --batch-size 128"
    arguments += " --loss-chunk 0"  # In chunks, it fits as it is.
    output = printed(
        capsys,
        shlex.split(f"{arguments} --model.num-layers 2 --sequence-length 2048"),
        fits=False,
    )
    found = re.search(
        rf"\ndoes not fit into the {ALLOCATED:,} bytes {OF_H200}, by [\d,]+: it fits with"
        r" (.*), and then takes ([\d,]+) bytes",
        output,
    )
    assert found is not None and "--gradient-accumulation-steps" in found[1]
    advised = printed(
        capsys, shlex.split(f"{arguments} --model.num-layers 2 --sequence-length 2048 {found[1]}")
    )
    left = ALLOCATED - int(found[2].replace(",", ""))
    assert f"\nfits into the {ALLOCATED:,} bytes {OF_H200}: {left:,} are left" in advised


def test_advice_on_a_run_that_fits_changes_nothing() -> None:
    run, sizes = parse(["--mesh.data", "1", "--mesh.tensor", "1"]), MeshSizes()
    mesh = make_abstract_mesh(sizes, GPUS["H200"].device)
    memory = memory_of(run, mesh)
    sentence = advice(run, mesh, memory, memory.total)
    assert sentence == f"it fits as it is, and takes {memory.total:,} bytes"


def test_dry_run_of_a_model_whose_state_alone_does_not_fit(capsys):
    output = printed(
        capsys,
        shlex.split(
            "--dry-run --device A100 --preset llama3-405b --mesh.data 1 --mesh.tensor 4"
            " --batch-size 1 --model.hidden-features 1064960 --model.num-heads 8"
        ),
        fits=False,
    )
    # A shorter sequence would not help: the moments alone are too large.
    state = r"of NVIDIA A100-SXM4-80GB, .*, by [\d,]+: parameters and optimizer state alone take"
    found = re.search(state + r" ([\d,]+) bytes .* use --zero 3 --mesh.fsdp (\d+) or more", output)
    assert found is not None
    taken, fsdp = int(found[1].replace(",", "")), int(found[2])
    limit = usable(GPUS["A100"].memory)
    assert taken / fsdp <= limit < taken / (fsdp / 2)
    assert "--lora.rank 16" in output and "--sequence-length" not in output
    assert "times on an A100 are estimated from its data sheet" in output


def test_dry_run_of_a_plain_model_lists_what_overlap_replaces(capsys):
    arguments = "--dry-run --preset llama3-8b --mesh.data 1 --mesh.tensor 8 --overlap rewrite"
    output = printed(capsys, shlex.split(arguments))
    replaced = re.findall(r" by overlap .*\n +models/layers/plain\.py:\d+ in (\S+)", output)
    assert {name.split(".")[0] for name in replaced} == {
        "AttentionProjection", "RowParallelLinear", "GatedFeedForward", "ColumnParallelLinear",
    }  # fmt: skip
    assert "10 runs of collective matmuls; of 10 the times are predicted" in output
    # The sum of the times is not that of a step, since layers share what is traced once.
    assert "are hidden under matmuls" in output
    assert re.search(r": \d+ left alone \(--verbose lists them\)", output)
    assert " in embed\n" not in output
    output = printed(capsys, [*shlex.split(arguments), "--verbose"])
    assert re.search(r" left alone\n +\S+ in \S*embed\n", output)


def test_a_dry_run_of_explicit_axes_needs_no_zero(capsys):
    """Its state has no weights in the compute dtype, which that of the same plain step has."""
    model = "--model.num-layers 1 --sequence-length 16 --batch-size 4 --mesh.data 1 --mesh.tensor 2"
    totals = []
    for overlap in ("rewrite-jit", "xla"):
        main([*shlex.split(model), "--dry-run", "--overlap", overlap])
        output = capsys.readouterr().out
        assert "predicted step" in output
        totals += re.findall(r"^ total +([\d,]+)", output, re.MULTILINE)
    assert len(totals) == 2 and totals[0] == totals[1]


def test_activations_of_a_dry_run_shrink_with_remat(capsys):
    deep = [*TINY, "--model.num-layers", "3", "--sequence-length", "1024"]

    def activations(*arguments: str) -> int:
        mesh = make_abstract_mesh(MeshSizes(data=2, tensor=2), GPUS["H200"].device)
        return memory_of(parse([*deep, *arguments]), mesh).activations

    least = activations("--remat", "full")
    most = activations("--remat", "none")
    dots, attention = (activations("--remat", remat) for remat in ("dots", "attention"))
    assert most > dots > attention > least
    output = printed(capsys, [*deep, "--dry-run", "--remat", "full"])
    assert re.search(rf"activations and gradients +{least:,}\s", output)
    # Positions and a log-sum-exp for each place of a document.
    assert activations("--remat", "none", "--separate-documents") > most


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--preset llama", "preset='llama': expected one of debug, llama3-8b"),
        ("--mesh.tensor 3", "mesh.data=2 × mesh.fsdp=1 × mesh.tensor=3"),
        ("--mesh.data 8", "mesh.data=8 × mesh.fsdp=1 × mesh.tensor=2 needs 16 devices and there"),
        ("--mesh.data 16 --mesh.tensor 0", "mesh.data=16 × mesh.fsdp=1 × mesh.tensor=1 needs 16"),
        ("--optimizer.clip-norm 0", "optimizer.clip_norm=0.0: expected a positive number"),
        ("--optimizer.decay-steps 10", "optimizer.decay_steps=10: expected more than"),
        ("--optimizer.b2 1", "optimizer.b2=1.0: expected at least 0 and less than 1"),
        ("--checkpoint-dir ''", "checkpoint_dir='': expected the name of a folder"),
        ("--profile 5:7", "profile='5:7': the run has 6 steps"),
        ("--mesh.data -1", "mesh.data=-1: expected a number of devices, or 0"),
        ("--mesh.fsdp -2", "mesh.fsdp=-2: expected a number of devices, or 0"),
        ("--mesh.fsdp 8", "mesh.data=2 × mesh.fsdp=8 × mesh.tensor=2 needs 32 devices"),
        ("--mesh.data 1 --mesh.fsdp 3 --batch-size 3 --zero 1 --model.features 100"
         " --model.hidden-features 100 --model.num-heads 4 --model.num-key-value-heads 4",
         "mesh.fsdp=3: divides no matrix of the model that is trained; choose a divisor of"
         " model.features=100"),
        ("--mesh.context -1", "mesh.context=-1: expected a number of devices"),
        ("--mesh.context 4 --mesh.data 1 --sequence-length 20",
         "sequence_length=20 is not divisible by 8: with mesh.context=4 × mesh.tensor=2"),
        ("--mesh.context 2 --mesh.data 1 --overlap rewrite", "overlap='rewrite': with mesh.con"),
        ("--context-attention ring", "context_attention='ring': expected 'auto' with mesh.context"),
        ("--context-attention cudnn", "context_attention='cudnn': expected auto, or names among"),
        ("--mesh.context 2 --mesh.data 1 --zero 3 --weight-gather matmuls",
         "weight_gather='matmuls': with mesh.context=2, weights are sharded over two axes"),
        ("--mesh.context 8", "mesh.data=2 × mesh.fsdp=1 × mesh.context=8 × mesh.tensor=2 needs 32"),
        ("--loss-chunk 1", "loss_chunk=1: expected at least mesh.tensor=2, a token for each"),
        ("--sequence-length 17",
         "sequence_length=17 is not divisible by mesh.tensor=2; nearest that works:"
         " --sequence-length 18"),
        ("--batch-size 3", "batch_size=3 is not divisible by mesh.data=2 × mesh.fsdp=1 ×"),
        ("--model.vocabulary-size 128", "model.vocabulary_size=128: expected at least 256, since"
         " without tokenizer each byte of the text is a token; give --model.vocabulary-size 256 or"
         " more, or --tokenizer FILE with fewer tokens"),
        ("--model.num-heads 24 --model.num-key-value-heads 3", "num_key_value_heads=3 is not div"),
        ("--data missing.txt", "data='missing.txt'"),
        ("--resume", "resume: expected checkpoint_dir too; add --checkpoint-dir DIR"),
        ("--profile 3", "profile='3': expected FIRST:LAST"),
        ("--steps 0", "steps=0: expected at least 1"),
        ("--overlap sometimes", "overlap='sometimes': expected auto, rewrite, rewrite-jit, or"
         " one or several of xla, ring, ring_two_way, ring_direct, one_shot, fused, separated by"),
        ("--overlap ring,sometimes", "overlap='ring,sometimes': expected auto, rewrite"),
        ("--overlap fused", "overlap='fused': fused is not possible: these kernels run on Hopper"
         " GPUs only; in all_gather_matmul; give --overlap fused,xla to use the first that can, or"
         " --overlap auto"),
        ("--overlap fused,one_shot", "give --overlap fused,one_shot,xla to use the first that can"),
        ("--mesh.data 1 --mesh.context 4 --context-attention ulysses --model.num-heads 2"
         " --model.num-key-value-heads 2", "context_attention='ulysses': ulysses is not possible:"),
        ("--attention flash3", "attention='flash3': flash3 is not possible: it runs on Hopper GPUs,"
         " and this is cpu; give --attention auto"),
        ("--fp8 tensorwise --overlap rewrite", "would not be those of this recipe; choose"),
        ("--fp8 rowwise --fp8-layers mlp", "'mlp' matches none of the layers layers.att"),
        ("--fp8-layers head", "fp8_layers='head': expected fp8 too; add --fp8, such"),
        ("--lora.alpha 32", "lora.alpha=32.0: expected lora.rank too; add --lora.rank, such as"),
        # Who sets a default means adapters all the same.
        ("--lora.alpha 16", "lora.alpha=16.0: expected lora.rank too; add --lora.rank, such as"),
        ("--lora.targets=all-linear --plan", "lora.targets='all-linear': expected lora.rank too"),
        ("--lora.no-rslora --dry-run", "lora.rslora=False: expected lora.rank too; add"),
        ("--lora.base_format None", "lora.base_format=None: expected lora.rank too; add"),
        ("--sequence-length 1000000", "fewer"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_a_sentence(capsys, arguments, sentence):
    message = refused(capsys, shlex.split(arguments))
    if sentence == "fewer":
        assert "1000001" in message.replace(",", "")
    elif "tensor=3" in sentence:
        assert "is not divisible by a tensor axis of 3 devices" in message
    else:
        assert sentence in message
    assert message.startswith("error: ")


@pytest.mark.parametrize(
    "tasks", list(itertools.combinations(["plan", "dry-run", "eval-only", "tune"], 2))
)
def test_one_thing_is_done_in_place_of_training(capsys, tasks):
    """A dry run of an evaluation would describe a step of training."""
    flags = [f"--{task}" for task in tasks]
    message = refused(capsys, flags)
    names = ", ".join(f"{task.replace('-', '_')}=True" for task in tasks)
    assert message.startswith(f"error: {names}: expected one of them")
    assert message.endswith(f"leave out {' or '.join(flags)}")


def test_files_of_earlier_runs_are_never_overwritten(capsys, tmp_path):
    log = tmp_path / "run.jsonl"
    log.write_text('{"step": 1}\n')
    assert "holds" in refused(capsys, ["--log-file", str(log)])
    assert log.read_text() == '{"step": 1}\n'


def test_a_checkpoint_of_another_model_or_of_other_data_is_refused(capsys, tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    printed(capsys, saved)
    assert "another model" in refused(capsys, [*saved, "--resume", "--model.features", "64"])
    message = refused(capsys, [*saved, "--resume", "--steps", "9", "--seed", "1"])
    assert "seed was 0, is 1" in message
    message = refused(capsys, [*saved, "--resume", "--steps", "5"])
    assert "steps=5: the checkpoint already has 6 steps" in message
    assert "--resume" in refused(capsys, saved)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(capsys, tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path), "--save-interval", "1", "--log-interval", "1"]
    # The first step has learning rate 0; the second makes weights without a finite loss.
    explode = shlex.split("--optimizer.learning-rate 1e30 --optimizer.warmup-steps 1 --steps 50")
    message = refused(capsys, [*saved, "--max-to-keep", "1", *explode], status=1)
    assert "step 2: the norm of the updated parameters" in message
    assert "the checkpoint of step 1 is kept" in message
    assert (tmp_path / "step_1").is_dir()
    assert not (tmp_path / "step_2").exists()
    # If nothing is saved in between, the next step is not finite.
    message = refused(capsys, ["--log-interval", "1", *explode], status=1)
    assert re.search(r"step 3: loss .* not both finite; stopped, no checkpoint was saved", message)


def test_profile_writes_a_trace(capsys, tmp_path):
    printed(capsys, ["--profile", "2:3", "--profile-dir", str(tmp_path)])
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_compare_prints_the_largest_difference_of_two_curves(capsys):
    arguments = [*TINY, "--steps", "4", "--a", "overlap=xla", "--b", "mesh.tensor=4"]
    compare.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"largest difference in loss: (\S+) nats, at step \d of 4", lines[-3])
    assert found is not None
    assert 0 < float(found[1]) < 0.01
    # Apart from that, a heading for each run and a line at each log interval.
    steps = [re.sub(r"\d\.\d{4}$", "?", line) for line in lines if "─" not in line]
    assert steps[:-3] == [
        f"{name}: step {step} of 4, loss ?" for name in ("a", "b") for step in (2, 4)
    ]
    assert len(lines) == 10


def test_compare_trains_every_variant(capsys):
    variants = ["--a", "overlap=xla", "--b", "overlap=ring", "seed=0", "--b", "seed=1"]
    compare.main([*TINY, "--steps", "2", *variants])
    output = capsys.readouterr().out
    assert re.findall(r"─ (.*?) ─", output) == [
        "a: overlap=xla", "b: overlap=ring seed=0", "c: seed=1",
        "comparison of a and b", "comparison of a and c",
    ]  # fmt: skip
    same, other = map(float, re.findall(r"largest difference in loss: (\S+) nats", output))
    assert same < 1e-3 < other
    assert len(re.findall(r"a / [bc] \d", output)) == 2


def test_compare_verbose_prints_every_step(capsys):
    compare.main([*TINY, "--steps", "3", "--verbose", "--a", "seed=0", "--b", "mesh.tensor=4"])
    output = capsys.readouterr().out
    assert "tensor=2 of" in output
    assert "tensor=4 of" in output
    assert re.findall(r"^ +(\d+) +\d\.\d{4} .*n/a", output, re.MULTILINE) == [*"123123"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--a", "ring", "--b", "overlap=ring"], "'ring': expected FIELD=VALUE"),
        (["--a", "steps=3", "--b", "steps=4"], "expected the same in all"),
        (["--dry-run", "--a", "seed=0", "--b", "seed=1"], "dry_run: comparing trains all"),
        (["--a", "seed=0", "--a", "steps=4", "--b", "seed=1"], "--a given 2 times"),
        (["--log-file", "x", "--a", "seed=0", "--b", "seed=1"], "comparing keeps no files"),
        (["--a", "seed=0", "--b", "overlap=fused"], "give --overlap fused,xla to use the first"),
    ],
)
def test_compare_refuses_in_a_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit):
        compare.main([*TINY, *arguments])
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_presets_differ_and_flags_win(capsys):
    config = parse(shlex.split("--preset llama3-70b --model.num-layers 4 --remat none"))
    assert (config.model.num_layers, config.model.features, config.remat) == (4, 8192, "none")
    with pytest.raises(SystemExit):
        parse(["--remat", "sometimes"])
    assert "remat" in capsys.readouterr().err


def test_gradient_accumulation_and_jsonl_data(capsys, tmp_path):
    lines = [
        json.dumps({"text": f"line {i} of a small text, long enough to train on"})
        for i in range(40)
    ]
    (tmp_path / "part.jsonl").write_text("\n".join(lines))
    arguments = ["--gradient-accumulation-steps", "2", "--separate-documents"]
    output = printed(capsys, ["--data", str(tmp_path / "*.jsonl"), *arguments])
    assert "part.jsonl" in output or "*.jsonl" in output
    assert "done: 6 steps" in output


def test_a_resume_with_other_data_names_both_texts(capsys, tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("The first text. " * 100)
    second.write_text("Another text. " * 100)
    run = ["--steps", "1", "--checkpoint-dir", str(tmp_path / "run")]
    printed(capsys, [*run, "--data", str(first)])
    again = [*run, "--steps", "2", "--resume"]
    other = "resume: the checkpoint was trained on other data: "
    fix = "; give the data, tokenizer, sequence length and seed that it was trained with, or begin"
    message = refused(capsys, [*again, "--data", str(second)])
    assert f"{other}data was '{first}', is '{second}'{fix}" in message
    message = refused(capsys, again)
    assert f"{other}data was '{first}', is the Python manual{fix}" in message
    same = [*again, "--data", str(first)]
    message = refused(capsys, [*same, "--seed", "7"])
    assert f"{other}seed was 0, is 7{fix}" in message
    # Elsewhere, the same text is the same.
    first.rename(second)
    assert "resumed" in printed(capsys, [*again, "--data", str(second)])
    first.write_text("The first text. " * 50)
    message = refused(capsys, [*same, "--steps", "3"])
    assert re.search(rf"{other}data was '{second}', is '{first}'", message)
    second.write_text("The first text. " * 50)
    message = refused(capsys, [*again, "--steps", "3", "--data", str(second)])
    had = r"had 1,601 tokens with sha256 \w{12}, and has 801 tokens with sha256 \w{12}"
    assert re.search(rf"{other}data={str(second)!r} {had}{fix}", message)
