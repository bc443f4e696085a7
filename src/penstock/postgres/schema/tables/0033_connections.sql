-- Which live connection gets what a subscription's queue holds, so that a server which hears of another one can look it up.

alter table penstock.subscriptions add column connection text;
comment on column penstock.subscriptions.connection is
    'The live connection to an HTTP server that receives the copies, the last one that came; null: none has come.';
