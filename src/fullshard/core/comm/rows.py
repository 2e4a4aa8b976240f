"""Addition of rows to a table, such as an embedding's gradient, in an order that does not depend on timing."""

from __future__ import annotations

import torch


def add_rows(table: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Add each of ``rows``, (lookups, width), to the row of ``table``, (height, width), that ``indices`` names.

    The same call gives the same bits, also on CUDA, where ``index_add_`` adds rows of one index in any order.
    ``index_put_`` is deterministic too, but took 23 ms for 8,192 and 2,048 rows of 1,024 numbers on an H100.
    """
    if table.is_cuda:
        add_rows_of_groups(table, indices, rows)
    else:
        table.index_add_(0, indices, rows)


def add_rows_of_groups(table: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows as :func:`add_rows` does, but first sum the rows of each index, then add each sum once.

    No temporary has the table's size, and the CPU waits for nothing: the number of distinct indices is not read.
    """
    lookups = len(indices)
    if not lookups:
        return
    in_order, order = indices.sort(stable=True)
    starts = in_order.new_zeros(lookups)
    starts[1:] = in_order[1:] != in_order[:-1]
    group_in_order = starts.cumsum(0)
    group = torch.empty_like(order)
    group[order] = group_in_order
    sums = torch.ops.aten.embedding_dense_backward(rows, group, lookups, padding_idx=-1, scale_grad_by_freq=False)
    # Groups that do not exist have a sum of zeros, which may be added anywhere.
    places = torch.arange(lookups, device=table.device) % len(table)
    places.scatter_(0, group_in_order, in_order)
    table.index_add_(0, places, sums)
