"""A stand-in for Kubernetes: the chart, played on this machine by processes in namespaces.

What it plays: Deployments (Recreate, RollingUpdate), StatefulSets, Services, ConfigMaps, Secrets,
claims, PodDisruptionBudgets and evictions, RayClusters as KubeRay 1.6 and newer make their pods,
and pods as `pod` says. What it cannot play:

* images: every container sees this machine's files and the tests' virtual environment;
* limits of resources, seccomp, affinity, tolerations and node selectors; nodes are names;
* NetworkPolicies, load balancers, ingress;
* the API server: so KubeRay's autoscaler container does not run;
* KubeRay's job that clears Redis when a RayCluster is deleted.
"""
