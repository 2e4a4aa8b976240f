"""Storage of checkpoints and models: atomic directories, sharded checkpoints, Hugging Face's files by streaming."""

from fullshard.state.storage import rules as rules
from fullshard.state.storage.atomic import (
    atomic_directory as atomic_directory,
    commit as commit,
    recover as recover,
    sibling as sibling,
    write_text as write_text,
)
from fullshard.state.storage.backend import Lock as Lock, backend_of as backend_of
from fullshard.state.storage.base import Base as Base, require_base as require_base
from fullshard.state.storage.completion import (
    Completion as Completion,
    add_small_file as add_small_file,
    changed_small_files as changed_small_files,
    check_completion as check_completion,
    copy_small_files as copy_small_files,
)
from fullshard.state.storage.contents import (
    CHECKPOINTS_NAME as CHECKPOINTS_NAME,
    FINISHED_NAME as FINISHED_NAME,
    WEIGHT_SUFFIXES as WEIGHT_SUFFIXES,  # the command line looks it up by name
    Kind as Kind,
    kind_of as kind_of,
    verify as verify,
)
from fullshard.state.storage.digest import content_of as content_of, directory_content as directory_content
from fullshard.state.storage.disk import DirectoryLock as DirectoryLock
from fullshard.state.storage.index import (
    Index as Index,
    Part as Part,
    PieceEntry as PieceEntry,
    TensorEntry as TensorEntry,
)
from fullshard.state.storage.json_file import as_json as as_json, read_bounded as read_bounded, read_json as read_json
from fullshard.state.storage.object_path import (
    ObjectPath as ObjectPath,
    Place as Place,
    as_place as as_place,
    file_system as file_system,
    is_url as is_url,
)
from fullshard.state.storage.reader import CheckpointReader as CheckpointReader
from fullshard.state.storage.rules import shown as shown
from fullshard.state.storage.safetensors_file import (
    SafetensorsWriter as SafetensorsWriter,
    TensorSpec as TensorSpec,
    mapped_file as mapped_file,
)
from fullshard.state.storage.shard_file import (
    Piece as Piece,
    SavePlan as SavePlan,
    dtype_of as dtype_of,
    is_shard_name as is_shard_name,
    shard_name as shard_name,
    specs_of as specs_of,
)
from fullshard.state.storage.store import (
    Keep as Keep,
    Survey as Survey,
    find_checkpoints as find_checkpoints,
    find_completions as find_completions,
    instead_of as instead_of,
    rank_by_metric as rank_by_metric,
    read_completion as read_completion,
    read_index as read_index,
    step_directory as step_directory,
    survey as survey,
)
from fullshard.state.storage.torch_reader import load_plain as load_plain, why_refused as why_refused
from fullshard.state.storage.weight_files import (
    ADAPTER_NAME as ADAPTER_NAME,
    WeightFiles as WeightFiles,
    WeightsWriter as WeightsWriter,
    holds_model as holds_model,
    parse_size as parse_size,
    publish_model as publish_model,
)
from fullshard.state.storage.writer import (
    GIVEN_UP as GIVEN_UP,
    Save as Save,
    SaveJob as SaveJob,
    begin as begin,
    commit_save as commit_save,
    read_part as read_part,
    write_part as write_part,
)
