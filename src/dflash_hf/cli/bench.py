"""This module is `dflash-hf bench`, which asks sets of questions in several ways of decoding and writes a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dflash_hf.cli.options import (
    DeviceOption,
    DtypeOption,
    NoThinkingOption,
    TemplateKwargsOption,
    ThreadsOption,
    template_options,
    values_of,
    width_of,
)
from dflash_hf.cli.pair import BUNDLED

if TYPE_CHECKING:
    from dflash_hf.bench.cells import RunSettings

QUESTIONS = BUNDLED / "held_out.jsonl"
TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--template",
        help="Text of the prompt, for rows that have none of these columns: messages, prompt, turns. Write "
        "column names in braces: 'Q: {question}'.",
    ),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option("--num-prompts", help="Number of questions of each set; default: all.", min=1),
]

app = typer.Typer(
    name="bench", help="Measure ways of decoding on sets of questions, and write a report."
)


@app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write: a new one, or with --resume the folder of an earlier run."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Folder or Hub id of the target; default: the bundled target."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or Hub id of the draft.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Sets of questions: names (gsm8k,humaneval,...) or files; default: the bundled pair's questions."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the files of the sets. With this option nothing is read from the Hub."
        ),
    ] = None,
    template: TemplateOption = None,
    num_prompts: NumPromptsOption = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Ways of decoding to compare. plain: generate. dflash: generate with the draft. undrafted: this "
            "package without the draft. stock: Transformers' own DFlash. zlab: z-lab's package. assistant: an "
            "ordinary draft model. lookup: prompt lookup. server: an OpenAI-style server. plain-static, "
            "stock-static: with a static cache."
        ),
    ] = "plain,dflash",
    assistant_model: Annotated[
        str | None, typer.Option(help="An ordinary draft model, for --methods assistant.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-style server, for --methods server.")
    ] = None,
    server_model: Annotated[
        str | None,
        typer.Option(
            help="Name of the model on the server; default: the first model that the server lists."
        ),
    ] = None,
    batch: Annotated[
        str,
        typer.Option(
            help="Number of questions answered together. This option and those below it, down to --proposal, may have "
            "several values, separated by commas."
        ),
    ] = "1",
    max_new_tokens: Annotated[str, typer.Option(help="Longest answer, in tokens.")] = "512",
    temperature: Annotated[
        str, typer.Option(help="Temperature of the answers; 0 is greedy.")
    ] = "0",
    top_p: Annotated[str, typer.Option(help="Nucleus sampling.")] = "1",
    dtype: DtypeOption = "auto",
    block_size: Annotated[
        str, typer.Option(help="Number of tokens per block; default: the draft's block size.")
    ] = "",
    verify_width: Annotated[
        str, typer.Option(help="Number of tokens of a block that are verified, or auto.")
    ] = "",
    num_tree_nodes: Annotated[
        str,
        typer.Option(
            help="Number of tokens in the tree of guesses, or auto. A tree has several guesses for one position. "
            "With 0, each position has one guess."
        ),
    ] = "",
    max_matching_ngram_size: Annotated[
        str,
        typer.Option(
            help="Longest match with earlier text, in tokens. If the last tokens of the text also occur earlier, "
            "the tokens that followed them there become guesses too. 0 is off."
        ),
    ] = "",
    proposal: Annotated[
        str,
        typer.Option(
            help="How the draft guesses tokens when sampling. argmax: its most likely token. shared_noise: a token "
            "drawn with the target's random numbers. sample: a token drawn with other random numbers."
        ),
    ] = "",
    system: Annotated[str | None, typer.Option(help="System prompt of every conversation.")] = None,
    chat_template_kwargs: TemplateKwargsOption = "{}",
    no_thinking: NoThinkingOption = False,
    seed: Annotated[
        int, typer.Option(help="Seed for drawing the questions and for sampling the answers.")
    ] = 0,
    repeats: Annotated[
        int, typer.Option(help="Number of times that each question is asked.", min=1)
    ] = 1,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Run the code in the answers, in a separate process, to score the answers.",
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Answer sets of questions with several ways of decoding. Write the answers, a summary and a report.

    Some options take several values, separated by commas: --batch 1,8 --temperature 0,1 compares four settings.
    """
    if ctx.invoked_subcommand is None:
        settings = read_settings(ctx.params)
        from dflash_hf.bench.run import run

        try:
            report = run(settings)
        except KeyboardInterrupt as error:
            typer.secho(
                f"Ended. The answers in {out} are kept: the same command with --resume continues the run.",
                err=True,
            )
            raise typer.Exit(130) from error
        if report is not None:
            record: Any = json.loads((settings.out / "run.json").read_text(encoding="utf-8"))
            for row in record["methods"]:
                if row["failed"] is not None:
                    typer.secho(f"{row['model_id']}: {row['failed']}", err=True, fg="red")
            typer.echo(report)


@app.command()
def prepare(
    names: Annotated[
        str, typer.Argument(help="Sets, separated by commas: gsm8k,math500,...", metavar="SETS")
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write. On a machine without a network, pass it to dflash-hf bench as --data-dir."
        ),
    ],
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the files of the sets; default: read the sets from the Hub."
        ),
    ] = None,
    num_prompts: NumPromptsOption = None,
    seed: Annotated[int, typer.Option(help="Seed for drawing the questions.")] = 0,
    template: TemplateOption = None,
) -> None:
    """Write sets of questions into a folder, for machines that have no network."""
    from dflash_hf.bench.prepare import prepare

    every = values_of(names, str, "SETS")
    for path in prepare(
        every, out, data_dir=data_dir, num_prompts=num_prompts, seed=seed, template=template
    ):
        typer.echo(path)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Folder of a run.")],
    after: Annotated[Path, typer.Argument(help="Folder of another run.")],
) -> None:
    """Compare two runs. Differences that may come from the choice of questions are marked as noise."""
    from dflash_hf.bench.compare import compare, comparison_tables

    console = Console()
    for table in comparison_tables(compare(before, after)):
        console.print(table)


def read_settings(given: Mapping[str, Any]) -> RunSettings:
    """Returns the settings of a run.

    Args:
        given (mapping): The options of [`bench`], as the command line gives them.

    Raises:
        ValueError: If an option cannot be read, or if a necessary option is missing.
    """
    methods = values_of(given["methods"], str, "--methods")
    # A server has its own target.
    is_bundled = given["target"] is None and given["draft"] is None and methods != ("server",)
    if given["out"] is None:
        raise ValueError("expected a folder to write as --out, got none; name a new one")
    if given["data"] is None and not is_bundled:
        raise ValueError(
            "expected sets of questions as --data, got none; name some, such as gsm8k,humaneval"
        )
    options = template_options(given["chat_template_kwargs"], given["no_thinking"])
    as_they_are = (
        "out",
        "server",
        "server_model",
        "data_dir",
        "template",
        "num_prompts",
        "system",
        "seed",
        "repeats",
    )
    from dflash_hf.bench.cells import RunSettings

    return RunSettings(
        **{name: given[name] for name in (*as_they_are, "device", "run_code", "resume")},
        data=values_of(given["data"] or str(QUESTIONS), str, "--data"),
        methods=methods,
        target=str(BUNDLED / "target") if is_bundled else given["target"],
        draft=str(BUNDLED / "draft") if is_bundled else given["draft"],
        assistant=given["assistant_model"],
        batch=values_of(given["batch"], int, "--batch"),
        max_new_tokens=values_of(given["max_new_tokens"], int, "--max-new-tokens"),
        temperature=values_of(given["temperature"], float, "--temperature"),
        top_p=values_of(given["top_p"], float, "--top-p"),
        dtype=values_of(given["dtype"], str, "--dtype"),
        block_size=values_of(given["block_size"], int, "--block-size") or (None,),
        verify_width=values_of(given["verify_width"], width_of, "--verify-width") or (None,),
        num_tree_nodes=values_of(given["num_tree_nodes"], width_of, "--num-tree-nodes") or (None,),
        max_matching_ngram_size=values_of(
            given["max_matching_ngram_size"], int, "--max-matching-ngram-size"
        )
        or (None,),
        proposal=values_of(given["proposal"], str, "--proposal") or (None,),
        template_options=options,
        # The other commands have this default too: a model as small as the bundled one is slower on several threads.
        threads=given["threads"] or (1 if is_bundled else None),
    )
