"""Configuration: the schema of the run file and how it is read."""

from fullshard.config.load import check_run as check_run
from fullshard.config.load import load_run as load_run
from fullshard.config.schema import DataConfig as DataConfig
from fullshard.config.schema import EvaluationConfig as EvaluationConfig
from fullshard.config.schema import ModelConfig as ModelConfig
from fullshard.config.schema import RunConfig as RunConfig
from fullshard.config.schema import ShardingConfig as ShardingConfig
from fullshard.config.schema import TokenizerConfig as TokenizerConfig
from fullshard.config.schema import TrainingConfig as TrainingConfig
