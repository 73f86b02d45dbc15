# SPDX-License-Identifier: Apache-2.0
# Sourced. Some virtual machines announce AMX and do not have it: plain PyTorch ends there with an
# illegal instruction in its first bfloat16 product. Where that happens, torch's oneDNN is limited to
# the largest instruction set that works, and says so.

multiplies_bf16() {
  .venv/bin/python -c 'import torch; x = torch.ones(32, 32, dtype=torch.bfloat16)
torch.nn.functional.linear(x, x); torch.set_num_threads(1); torch.nn.functional.linear(x, x)' > /dev/null 2>&1
}

limit_to_working_isa() {
  [[ -z ${ONEDNN_MAX_CPU_ISA:-} ]] || return 0
  { multiplies_bf16; } 2> /dev/null && return 0
  local isa
  for isa in AVX512_CORE_FP16 AVX512_CORE_BF16 AVX512_CORE AVX2; do
    export ONEDNN_MAX_CPU_ISA=$isa
    if { multiplies_bf16; } 2> /dev/null; then
      printf '== torch cannot multiply bfloat16 here: ONEDNN_MAX_CPU_ISA=%s\n' "$isa"
      return 0
    fi
  done
  unset ONEDNN_MAX_CPU_ISA
}
