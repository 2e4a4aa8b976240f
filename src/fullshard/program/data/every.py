"""All names that other rooms take from this one, in one import; torch is imported with them."""

from fullshard.program.data.batching.budget import TokenPlan as TokenPlan
from fullshard.program.data.batching.collate import (
    IGNORED_LABEL as IGNORED_LABEL,
    Batch as Batch,
    CollateSpec as CollateSpec,
    Packing as Packing,
    Pairs as Pairs,
    RowRef as RowRef,
    collate as collate,
)
from fullshard.program.data.batching.feed import feed as feed
from fullshard.program.data.batching.mixture import Mixture as Mixture
from fullshard.program.data.batching.padding import (
    fixed_shapes as fixed_shapes,
    padding_share as padding_share,
    step_shapes as step_shapes,
    step_sizes as step_sizes,
)
from fullshard.program.data.batching.shapes import MOST_SHAPES as MOST_SHAPES, Shape as Shape, positions as positions
from fullshard.program.data.batching.stream import (
    BatchPlan as BatchPlan,
    EpochPlan as EpochPlan,
    batches as batches,
    steps as steps,
)
from fullshard.program.data.examples import (
    Conversation as Conversation,
    Example as Example,
    InputRow as InputRow,
    InputTable as InputTable,
    SourceSpec as SourceSpec,
    Split as Split,
    Table as Table,
    Turn as Turn,
    asked as asked,
    in_pairs as in_pairs,
    with_unrelated as with_unrelated,
)
from fullshard.program.data.reading.cells import cell_json as cell_json
from fullshard.program.data.reading.conversations import (
    SystemTurnCounts as SystemTurnCounts,
    answers_as_rows as answers_as_rows,
    asked_note as asked_note,
)
from fullshard.program.data.reading.encoding import encoding_of_rows as encoding_of_rows
from fullshard.program.data.reading.row import UnusableRowsError as UnusableRowsError, distinct as distinct
from fullshard.program.data.reading.sample import Sample as Sample, sample_notes as sample_notes
from fullshard.program.data.reading.split import (
    fingerprint as fingerprint,
    read_inputs as read_inputs,
    read_split as read_split,
    split_lists as split_lists,
    with_rows_of as with_rows_of,
)
from fullshard.program.data.streaming import (
    SAMPLED_ROWS as SAMPLED_ROWS,
    StreamedRows as StreamedRows,
    index_to as index_to,
    lengths_to as lengths_to,
    open_stream as open_stream,
    sample_lengths as sample_lengths,
    training_texts as training_texts,
)
from fullshard.program.data.tokenizing.cache import (
    cached as cached,
    open_tokens as open_tokens,
    tokenize_to as tokenize_to,
)
from fullshard.program.data.tokenizing.chat import add_plain_template as add_plain_template
from fullshard.program.data.tokenizing.ragged import Ragged as Ragged
from fullshard.program.data.tokenizing.spans import (
    Corruption as Corruption,
    corrupted as corrupted,
    num_sentinels as num_sentinels,
    row_tokens as row_tokens,
    sentinel_ids as sentinel_ids,
)
from fullshard.program.data.tokenizing.tokenize import (
    ONE_ROW as ONE_ROW,
    LengthStats as LengthStats,
    TokenizedSet as TokenizedSet,
    TokenizeSpec as TokenizeSpec,
    chained as chained,
    choose_separator as choose_separator,
    describe_separator as describe_separator,
    row_parts as row_parts,
    show_row as show_row,
    tokenize as tokenize,
    uses_chat_template as uses_chat_template,
    writes_date as writes_date,
)
from fullshard.program.data.tokenizing.written import (
    Unwritten as Unwritten,
    find_unwritten as find_unwritten,
    references_of as references_of,
    written_forms as written_forms,
)
