"""Consumer groups: members of a group share a stream's partitions by the ownership protocol and consume each in order.

Events go one way: `consumer` fetches them into a `partition_state` (one for each owned partition, with its buffer), `dispatcher`
passes them to the handler, and `committer` writes the results. `consumer` puts the parts together; `pull` is the form in which a
program requests batches itself.
"""
