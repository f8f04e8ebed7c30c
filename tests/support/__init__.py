"""What several folders of tests share: a whole cluster in one process, and parts for it."""
