"""MindSpeed, which adapts Megatron to Ascend devices: its settings, their contradictions, and its operators."""
