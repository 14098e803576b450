"""Turns documents into token ids, in worker processes and in the order of the documents.

Each worker has a pipe of its own, and batches go to the workers in turn. A pool with shared queues
(``concurrent.futures`` has one) hangs when a worker is killed while it writes a result: the others
keep the queue open, so the reader waits for ever for the rest of the message. Here the end of a
worker closes its pipe, and the end of the main process closes them all.
"""

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING

import numpy
import numpy.typing

from tools.preprocessing.documents import Record
from tools.preprocessing.errors import InputError, WorkerError
from tools.preprocessing.tokenizer import TextEncoder

if TYPE_CHECKING:
    from tools.preprocessing.sentences import SentenceSplitter

_BATCH_BYTES = 1 << 18
_BATCH_RECORDS = 512
_BATCHES_IN_FLIGHT_PER_WORKER = 4


@dataclass(frozen=True)
class EncodedText:
    """The tokens of one document under one key.

    Attributes:
        tokens: All token ids, one after another: shape ``(sum(lengths),)``, int32.
        lengths: Number of tokens of each sequence: of each sentence, or of the whole text.
            Sequences without tokens are left out, so an empty text has none.
    """

    tokens: numpy.typing.NDArray[numpy.int32]
    lengths: list[int]


@dataclass(frozen=True)
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
        records: The documents; read in the calling process, which must be in its main thread.
        workers: Number of worker processes; with 1, the calling process does the work itself.

    Raises:
        InputError: A record cannot be read or decoded.
        WorkerError: A worker process died.
    """
    if workers == 1:
        yield from map(encoder.encode, records)
        return
    with _workers(encoder, workers) as pipes:
        in_flight: deque[Connection] = deque()
        for number, batch in enumerate(_batches(records)):
            if len(in_flight) == workers * _BATCHES_IN_FLIGHT_PER_WORKER:
                yield from _receive(in_flight.popleft())
            pipe = pipes[number % workers]
            _send(pipe, batch)
            in_flight.append(pipe)
        while in_flight:
            yield from _receive(in_flight.popleft())


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
def _workers(encoder: DocumentEncoder, count: int) -> Iterator[list[Connection]]:
    """Start workers and hand out the pipes to them; end them with the block."""
    # "spawn" because the calling process has threads by now, with which forking is not safe.
    context = multiprocessing.get_context("spawn")
    # Started beforehand because starting it, which the first worker would, lets interrupts in.
    resource_tracker.ensure_running()
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    try:
        for _ in range(count):
            pipe, workers_end = context.Pipe()
            pipes.append(pipe)
            with workers_end, _interrupts_deferred():
                process = context.Process(target=_work, args=(encoder, workers_end), daemon=True)
                process.start()
                processes.append(process)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, and for good in processes started meanwhile.

    Ctrl-C reaches the whole process group, but the main process alone decides what it means; a
    worker that only begins to ignore it would print a traceback when hit before that.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(pipe: Connection, batch: list[Record]) -> None:
    try:
        pipe.send(batch)
    except OSError:
        raise _worker_died() from None


def _receive(pipe: Connection) -> list[EncodedDocument]:
    try:
        answer: list[EncodedDocument] | InputError = pipe.recv()
    except (EOFError, OSError):
        raise _worker_died() from None
    if isinstance(answer, InputError):
        raise answer
    return answer


def _worker_died() -> WorkerError:
    return WorkerError(
        "a worker process died (killed, or the machine ran out of memory); "
        "try again with fewer --workers"
    )


def _work(encoder: DocumentEncoder, pipe: Connection) -> None:
    """Answer each batch that comes through the pipe, until the main process closes it."""
    batches: queue.SimpleQueue[list[Record]] = queue.SimpleQueue()
    threading.Thread(target=_take_in, args=(pipe, batches), daemon=True).start()
    while True:
        batch = batches.get()
        answer: list[EncodedDocument] | InputError
        try:
            answer = [encoder.encode(record) for record in batch]
        except InputError as error:
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            return


def _take_in(pipe: Connection, batches: "queue.SimpleQueue[list[Record]]") -> None:
    """Read batches as they come, and end this process when the main one closes the pipe or ends.

    In a thread of its own so that the main process is never kept waiting by a worker that itself
    waits for its answer to be read.
    """
    try:
        while True:
            batches.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)
