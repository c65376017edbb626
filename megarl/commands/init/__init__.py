"""`megarl init`: write a first recipe from the answers to at most five questions."""
