"""Full weight sync: the trainers' rank 0 sends whole tensors to every engine rank."""
