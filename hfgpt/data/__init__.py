"""From a text to batches of tokens. Each stage knows only the one before it:

open_source.py     opens a text by name: local files, a Hub dataset, or the embedded text
source.py          the open text: units that are read independently, and their documents
formats/           what a file contains: units, and the rows of a unit. New file formats go here
held_out.py        which part is validation text; eval_source.py if it is another text
tokenization.py    the tokenizer; encoding.py turns documents into ids
memory_blocks.py   blocks of a text in memory; document_stream.py does it for a text of any size
mixture.py         exact shares of several of these
loader.py          each process's share of each step
prepare.py         combines all of this for a new run, with prepare_text.py for each text; run_text.py for a run that
                   is resumed, audited or verified
"""

from hfgpt.data.encoding import describe_skipped
from hfgpt.data.prepare import prepare_data
from hfgpt.data.prepare_text import TextData
from hfgpt.data.run_text import prepare_data_of_run

__all__ = ["TextData", "describe_skipped", "prepare_data", "prepare_data_of_run"]
