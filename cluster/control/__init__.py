"""The controller: which workers and router processes should live, and where; audits of them."""
