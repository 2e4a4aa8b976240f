"""Configuration: the schema of the run file, and reading it."""

from fullshard.program.config.data import DataConfig as DataConfig
from fullshard.program.config.load import (
    check_run as check_run,
    load_run as load_run,
    require_output_dir as require_output_dir,
)
from fullshard.program.config.model import (
    AdapterConfig as AdapterConfig,
    ModelConfig as ModelConfig,
    QuantizationConfig as QuantizationConfig,
    TokenizerConfig as TokenizerConfig,
    require_base as require_base,
)
from fullshard.program.config.recorded import (
    PROMPT_NAME as PROMPT_NAME,
    RUN_NAME as RUN_NAME,
    SUMMARY_NAME as SUMMARY_NAME,
    prompt_settings as prompt_settings,
    prompt_text as prompt_text,
    read_evaluated as read_evaluated,
    read_prompt as read_prompt,
    read_run as read_run,
    recorded_base as recorded_base,
    recorded_prompt as recorded_prompt,
    recorded_run as recorded_run,
    recorded_turns as recorded_turns,
    run_of as run_of,
)
from fullshard.program.config.schema import (
    EvaluationConfig as EvaluationConfig,
    RunConfig as RunConfig,
    ShardingConfig as ShardingConfig,
    changed_settings as changed_settings,
    flat_settings as flat_settings,
    option_of as option_of,
    options as options,
)
from fullshard.program.config.training import ProfileConfig as ProfileConfig, TrainingConfig as TrainingConfig
