"""Splits documents into sentences with NLTK's Punkt models."""

from itertools import pairwise

from nltk.tokenize.punkt import PunktTokenizer

from tools.preprocessing.errors import InputError


class SentenceSplitter:
    """Cuts a text into sentences. It can be pickled, so workers get it ready to use.

    Args:
        language: Name of a Punkt model, such as ``english``.
        keep_newlines: Whether a sentence keeps the white space that follows it, so that the
            sentences of a document put together are the document. Otherwise it is dropped.

    Raises:
        InputError: The language's model is not among NLTK's data on this machine.
    """

    def __init__(self, language: str, keep_newlines: bool) -> None:
        self._keep_newlines = keep_newlines
        try:
            self._punkt = PunktTokenizer(language)
        except LookupError:
            raise InputError(
                f"--split-sentences: NLTK's data on this machine has no Punkt model for --lang "
                f"{language}; run 'python -m nltk.downloader punkt_tab', or unpack punkt_tab.zip "
                "in FOLDER/tokenizers and set NLTK_DATA=FOLDER"
            ) from None
        except ValueError as error:
            raise InputError(f"--lang {language}: {error}") from None

    def split(self, text: str) -> list[str]:
        """Return the sentences of ``text`` in order; white space alone is no sentence."""
        spans = list(self._punkt.span_tokenize(text))
        if not self._keep_newlines:
            return [text[start:end] for start, end in spans]
        if not spans:
            return []
        starts = [0, *(start for start, _ in spans[1:]), len(text)]
        return [text[start:end] for start, end in pairwise(starts)]
