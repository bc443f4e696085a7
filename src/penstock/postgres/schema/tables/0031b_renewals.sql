-- A renewal says how far the topic is, so that a subscriber whose subscription has ended begins again where it was.

drop function if exists penstock.renew_subscriptions(text[], text[]);
