"""Turns documents into token ids, in worker processes and in the order of the documents."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import numpy.typing

from tools.preprocessing.documents import Record
from tools.preprocessing.errors import WorkerError
from tools.preprocessing.tokenizer import TextEncoder

if TYPE_CHECKING:
    from tools.preprocessing.sentences import SentenceSplitter

_BATCH_BYTES = 1 << 18
_BATCH_RECORDS = 512
_BATCHES_IN_FLIGHT_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The tokens of one document under one key.

    Attributes:
        tokens: All token ids, one after another: shape ``(sum(lengths),)``, int32.
        lengths: Number of tokens of each sequence: of each sentence, or of the whole text.
            Sequences without tokens are left out, so an empty text has none.
    """

    tokens: numpy.typing.NDArray[numpy.int32]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """A document ready to be written.

    Attributes:
        texts: One per key, in the order of :attr:`DocumentEncoder.keys`.
        input_bytes: Bytes that the document took in its input file, after decompression.
    """

    texts: list[EncodedText]
    input_bytes: int


@dataclass(frozen=True)
class DocumentEncoder:
    """What is done to each document. It can be pickled, and each worker gets a copy.

    Attributes:
        keys: Keys of a JSON object to encode.
        text_encoder: Turns a text into token ids.
        splitter: Cuts a text into the sentences that become sequences; None for one sequence.
        end_of_document: Token id to append to every document that has tokens; None to append none.
    """

    keys: Sequence[str]
    text_encoder: TextEncoder
    splitter: "SentenceSplitter | None"
    end_of_document: int | None

    def encode(self, record: Record) -> EncodedDocument:
        """Return the tokens of a document.

        Raises:
            InputError: The record cannot be decoded.
        """
        texts = [self._encode_text(text) for text in record.texts(self.keys)]
        return EncodedDocument(texts, len(record.content))

    def _encode_text(self, text: str) -> EncodedText:
        sequences = [text] if self.splitter is None else self.splitter.split(text)
        tokens: list[int] = []
        lengths: list[int] = []
        for sequence in sequences:
            ids = self.text_encoder.encode(sequence) if sequence else []
            if ids:
                tokens += ids
                lengths.append(len(ids))
        if lengths and self.end_of_document is not None:
            tokens.append(self.end_of_document)
            lengths[-1] += 1
        return EncodedText(numpy.asarray(tokens, dtype=numpy.int32), lengths)


def encode_in_order(
    encoder: DocumentEncoder, records: Iterable[Record], workers: int
) -> Generator[EncodedDocument, None, None]:
    """Encode documents in ``workers`` processes and yield them in the order of ``records``.

    Reading stays at most a few batches ahead of what was yielded, so memory does not grow with the
    corpus. Closing the generator stops the workers.

    Args:
        encoder: What is done to each document.
        records: The documents; read in the calling process.
        workers: Number of worker processes; with 1, the calling process does the work itself.

    Raises:
        InputError: A record cannot be read or decoded.
        WorkerError: A worker process died.
    """
    if workers == 1:
        yield from map(encoder.encode, records)
        return
    # "spawn" because the calling process has threads by now, with which forking is not safe.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_initialize_worker,
        initargs=(encoder,),
    )
    in_flight: deque[Future[list[EncodedDocument]]] = deque()
    try:
        for batch in _batches(records):
            # The pool starts the workers here, and they inherit that Ctrl-C does not reach them.
            with _interrupts_deferred():
                in_flight.append(pool.submit(_encode_batch, batch))
            if len(in_flight) >= workers * _BATCHES_IN_FLIGHT_PER_WORKER:
                yield from in_flight.popleft().result()
        while in_flight:
            yield from in_flight.popleft().result()
    except BrokenProcessPool:
        raise WorkerError(
            "a worker process died (killed, or the machine ran out of memory); "
            "try again with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.content)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, in this thread and in what it starts meanwhile.

    Ctrl-C reaches the whole process group, but the main process alone decides what it means; a
    worker that only begins to ignore it would print a traceback when hit before that.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_encoder: DocumentEncoder | None = None
"""The encoder of this process where it is a worker."""


def _initialize_worker(encoder: DocumentEncoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    """End this worker when the main process is gone; a killed one cannot tell its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in workers only"
    parent.join()
    os._exit(1)


def _encode_batch(records: list[Record]) -> list[EncodedDocument]:
    assert _worker_encoder is not None, "the pool initializes every worker"
    return [_worker_encoder.encode(record) for record in records]
