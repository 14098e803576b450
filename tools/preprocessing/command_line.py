"""Options, error messages and exit status of ``tools/preprocess_data.py``."""

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from tools.preprocessing.documents import INPUT_FORMATS
from tools.preprocessing.errors import InputError, WorkerError
from tools.preprocessing.settings import Settings

_PROGRAM = "preprocess_data.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool.

    Args:
        arguments: Command-line arguments; the process's own when None.

    Returns:
        Exit status: 0 when the datasets are complete, 2 for a wrong argument or input, 1 when the
        machine failed (a full disk, a killed worker), 130 when interrupted.
    """
    settings = parse(arguments)
    # So that unwinding removes the unfinished output, as it does for an interrupt.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        # Imported here because it imports packages that may be missing.
        from tools.preprocessing.run import preprocess

        preprocess(settings)
    except InputError as error:
        return _fail(str(error), 2)
    except ModuleNotFoundError as error:
        return _fail(f"needs the package {error.name}; run 'pip install {error.name}'", 2)
    except WorkerError as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(f"cannot write the output: {error}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", 130)
    return 0


def parse(arguments: Sequence[str] | None) -> Settings:
    """Return what the arguments ask for; end the process with status 2 if they make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.train_tokenizer and options.vocab_size is None:
        parser.error("--train-tokenizer: give the size of the vocabulary with --vocab-size")
    if options.vocab_size is not None and not options.train_tokenizer:
        parser.error(
            f"--vocab-size {options.vocab_size}: the tokenizer on disk has its own vocabulary; "
            "drop it, or give --train-tokenizer in place of --tokenizer-model"
        )
    if options.keep_newlines and not options.split_sentences:
        parser.error(
            "--keep-newlines: nothing is dropped without --split-sentences; drop the one or add "
            "the other"
        )
    if len(set(options.json_keys)) < len(options.json_keys):
        parser.error(f"--json-keys {' '.join(options.json_keys)}: name each key once")
    return Settings(
        inputs=options.input,
        glob_patterns=options.glob,
        input_format=options.input_format,
        keys=options.json_keys,
        split_sentences=options.split_sentences,
        keep_newlines=options.keep_newlines,
        language=options.lang,
        tokenizer_model=options.tokenizer_model,
        trained_vocabulary_size=options.vocab_size,
        add_special_tokens=not options.tokenizer_hf_no_include_special_tokens,
        trust_remote_code=options.trust_remote_code,
        append_end_of_document=options.append_eod,
        output_prefix=options.output_prefix,
        overwrite=options.overwrite,
        workers=options.workers,
        log_interval=options.log_interval,
    )


class _OneLineParser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the usage that fills a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help explains the options)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog=_PROGRAM,
        description="Turn text into the indexed datasets that Megatron trains on. "
        "An option of upstream's tool has upstream's name.",
        allow_abbrev=False,
    )
    _add_input_options(parser.add_argument_group("input"))
    _add_tokenizer_options(parser.add_argument_group("tokenizer"))
    _add_output_options(parser.add_argument_group("output"))
    _add_run_time_options(parser.add_argument_group("run time"))
    return parser


def _add_input_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, or folders with --glob; .gz is decompressed",
    )
    group.add_argument(
        "--glob",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="files to take from a folder, such as '*.txt', or '**/*.py' with its sub-folders",
    )
    group.add_argument(
        "--input-format",
        choices=INPUT_FORMATS,
        default="auto",
        help="text: a file is one document; jsonl: each line is a JSON object; auto: jsonl for "
        ".json, .jsonl and .ndjson, else text (default: auto)",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the JSON objects to encode, one dataset each (default: text)",
    )
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="make each sentence a sequence of its own, with NLTK's Punkt",
    )
    group.add_argument(
        "--keep-newlines",
        action="store_true",
        help="with --split-sentences: keep the white space after a sentence in it",
    )
    group.add_argument(
        "--lang",
        default="english",
        metavar="MODEL",
        help="Punkt model for --split-sentences (default: english)",
    )


def _add_tokenizer_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizer-type",
        choices=["HuggingFaceTokenizer"],
        default="HuggingFaceTokenizer",
        help="the one type that is supported",
    )
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--tokenizer-model", metavar="PATH", help="folder or tokenizer.json on this machine's disk"
    )
    source.add_argument(
        "--train-tokenizer",
        action="store_true",
        help="train a byte-level BPE tokenizer on the input and save it as PREFIX_tokenizer",
    )
    group.add_argument(
        "--vocab-size",
        type=_positive_integer,
        metavar="N",
        help="with --train-tokenizer: entries of the vocabulary, special tokens included",
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="leave out the tokens that the tokenizer puts around each text",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let Python code in the tokenizer's folder run",
    )
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="end every document with the tokenizer's eos_token",
    )


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="the files are PREFIX_<key>_document.bin and .idx (_sentence with --split-sentences)",
    )
    group.add_argument("--overwrite", action="store_true", help="replace existing output")


def _add_run_time_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        type=_positive_integer,
        default=1,
        metavar="N",
        help="processes that encode; the output does not depend on it (default: 1)",
    )
    group.add_argument(
        "--log-interval",
        type=_positive_integer,
        metavar="N",
        help="write a line of progress every N documents (default: only a bar, on a terminal)",
    )


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal_number)


def _fail(message: str, status: int) -> int:
    print(f"{_PROGRAM}: error: {message}", file=sys.stderr)
    return status
