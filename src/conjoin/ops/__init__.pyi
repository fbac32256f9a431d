from .devices import (
    Gathered as Gathered,
    choose_bf16 as choose_bf16,
    choose_device as choose_device,
    gather_rows as gather_rows,
    gather_with_gradient as gather_with_gradient,
    is_distributed as is_distributed,
    local_positions as local_positions,
)
from .logsumexp import (
    KEPT_BYTES as KEPT_BYTES,
    Exclusion as Exclusion,
    cross_logsumexp as cross_logsumexp,
    grouped_logsumexp as grouped_logsumexp,
    pair_logsumexp as pair_logsumexp,
    self_logsumexp as self_logsumexp,
)
