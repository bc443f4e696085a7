"""Consumer groups: members of a group share a stream's partitions by the ownership protocol and consume each in order.

Events go fetcher -> part (one for each owned partition: its buffer and its handler) -> committer. `consumer.py` puts them
together; `pull.py` is the form in which a program asks for batches itself.
"""
