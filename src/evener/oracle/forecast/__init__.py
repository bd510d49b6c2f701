"""Forecasts: what every way of dividing a model over given machines would cost, and which of them to take.

outlook = search(Scenario(Job(graph=graph, batch_size=256), profile))
plan, words = plan_of(outlook), advice(outlook)
"""
