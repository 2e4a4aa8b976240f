"""Texts of Accelerate's configuration files."""

import yaml

VERSION_1 = yaml.safe_dump(
    {
        "distributed_type": "FSDP",
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "mixed_precision": "no",
        "downcast_bf16": "no",
        "dynamo_backend": "NO",
        "main_training_function": "main",
        "fsdp_config": {
            "fsdp_sharding_strategy": 1,
            "fsdp_offload_params": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "T5Block",
            "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        },
        "deepspeed_config": {},
        "megatron_lm_config": {},
    }
    | dict.fromkeys(("command_file", "commands", "gpu_ids", "main_process_ip", "main_process_port"))
    | dict.fromkeys(("tpu_name", "tpu_zone"))
)
"""The keys that Accelerate 0.2x writes for FSDP, those of other trainers empty."""

VERSION_2 = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_min_num_params: 2000
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: c10d
same_network: false
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""What the questionnaire of Accelerate 1.15 writes for its FSDP2."""
