"""Which other kvds there are: what the operator wrote down, and what a source (DNS, etcd) tells. It lets nobody in."""
