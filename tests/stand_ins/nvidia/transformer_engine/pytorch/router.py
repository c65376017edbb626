"""Fused routing, which `moe_router_fusion` needs and no test uses."""

fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = None
